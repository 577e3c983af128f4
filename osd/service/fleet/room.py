"""Why no machine of the Ray cluster runs a part of the service."""

from __future__ import annotations

from osd.records import Place
from osd.service import cluster


def why_pending(place: Place | None, resource: str, num_gpus: float) -> str:
    """Why no machine runs a replica yet that was last at `place`; "" where one does, or nothing is
    known. Blocks, for ever where Ray's head is gone."""
    try:
        nodes, there, free = cluster.machines()
        here = cluster.node_id()
    except Exception as error:  # noqa: BLE001  whatever Ray raises when its head is gone
        return f"the Ray cluster does not answer ({type(error).__name__})"
    if place is not None and any(node["NodeID"] == place.node for node in nodes):
        return ""
    if reason := lacking(there, resource, num_gpus, "replica_resource", "serving.num_gpus"):
        return reason
    able = [
        node["Resources"]
        for node in nodes
        if (node["Resources"].get(resource, 0) >= 1 if resource else node["NodeID"] == here)
    ]
    if all(has.get("GPU", 0) < num_gpus for has in able):
        where = f"with {resource!r} (ray.replica_resource)" if resource else "of the service itself"
        return f"serving.num_gpus={num_gpus:g}, and no machine {where} has so many"
    if resource and free.get(resource, 0) < 1:
        return f"no machine has {resource!r} (ray.replica_resource) left"
    if num_gpus > free.get("GPU", 0):
        return f"serving.num_gpus={num_gpus:g}, and {free.get('GPU', 0):g} GPUs are free"
    return "" if place is None else f"{place.host} has left the Ray cluster"


def lacking(there: dict[str, float], resource: str, num_gpus: float, key: str, gpu_key: str) -> str:
    """Why no machine can run a part, from the resources of the cluster; "" where they suffice. The
    keys are those that ask for them."""
    if resource and not there.get(resource):
        return f"no machine of the Ray cluster has the resource {resource!r} (ray.{key})"
    if num_gpus > there.get("GPU", 0):
        return f"{gpu_key}={num_gpus:g}, and the Ray cluster has {there.get('GPU', 0):g} GPUs"
    return ""
