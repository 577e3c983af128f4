"""A manifest for KubeRay: what in it would keep a service from starting, by line.

YAML ──► kinds and names ──► words not filled in ──► fields ──► the Ray cluster ──► what it names
──► `osd serve` and its configuration ──► machines and ports that it asks for
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.doctor import crds, kuberay_serve
from osd.doctor.checks import Check
from osd.doctor.documents import Document, check_filled_in
from osd.errors import OSDError
from osd.exchange.redis_url import is_loopback
from osd.service.plan import asked_of_machines, check_remote_parts

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
GPU = "nvidia.com/gpu"
NAMED = {
    "secretKeyRef": ("Secret", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMap": ("ConfigMap", "name"),
    "secret": ("Secret", "secretName"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}
"""Field that names another document -> its kind, and where the name stands."""


def checks(documents: Sequence[Document], definitions: Path | None) -> Iterator[Check]:
    """Every check. `definitions`: a folder with those of KubeRay's kinds; None = fields are not
    checked. Raises `ConfigError` where the folder has none."""
    nameless = [text for document in documents for text in _nameless(document)]
    yield Check("documents", not nameless, "; ".join(nameless) or f"{len(documents)}, all named")
    yield check_filled_in(documents[0].text)
    yield from _fields(documents, definitions)
    jobs = [document for document in documents if document.get("kind") == "RayJob"]
    if len(jobs) != 1 or not isinstance(jobs[0].get(CLUSTER), dict):
        yield _no_job(documents, jobs)
        return
    (job,) = jobs
    yield from _cluster(job)
    yield _result("references", _references(documents), "everything that is named is there")
    try:
        config = kuberay_serve.configuration(documents, job)
        check_remote_parts(config)
    except OSDError as error:
        yield Check("configuration", False, kuberay_serve.with_line(documents, job, error))
        return
    yield Check("configuration", True, f"target {config.serving.target}, every key is known")
    yield _result("resources", _resources(job, config), "some pod has what each part asks for")
    yield _result("services", _services(documents, job, config), "they reach pods and ports")


def _result(name: str, problems: Iterator[str], well: str) -> Check:
    found = list(problems)
    return Check(name, not found, "; ".join(found) or well)


def _nameless(document: Document) -> Iterator[str]:
    for key in ("apiVersion", "kind", "metadata.name"):
        if not isinstance(document.get(key), str):
            yield f"{document.at(key)}: this document has no {key}, without which nothing is made"


def _no_job(documents: Sequence[Document], jobs: Sequence[Document]) -> Check:
    for document in documents:
        if document.get("kind") == "RayService":
            text = "a RayService runs applications of Ray Serve, and this is none; make it a RayJob"
            return Check("job", False, f"{document.at('kind')}: {text}")
    where = jobs[-1].at("spec") if jobs else documents[0].at("")
    text = "one RayJob with a rayClusterSpec is needed, whose entrypoint is `osd serve`"
    return Check("job", False, f"{where}: {text}; begin with configs/kuberay.yaml")


def _fields(documents: Sequence[Document], definitions: Path | None) -> Iterator[Check]:
    if definitions is None:
        yield Check("fields", None, "not checked; --crds DIR names KubeRay's definitions")
        return
    schemas = crds.schemas_of(definitions)
    found = [
        f"{document.at(key)}: {problem}"
        for document in documents
        for key, problem in crds.problems(document, schemas)
    ]
    yield Check("fields", not found, "; ".join(found) or f"as {definitions} defines them")
    if "ray.io/v1 RayJob" not in schemas:
        text = f"{definitions} has no RayJob: of one, only the rayClusterSpec was checked"
        yield Check("fields", None, text)


# -- the Ray cluster ------------------------------------------------------------------------------


def _cluster(job: Document) -> Iterator[Check]:
    mode, key = job.get(f"{CLUSTER}.authOptions.mode"), f"{CLUSTER}.authOptions.mode"
    text = "whoever reaches Ray's ports could run code; set authOptions: {mode: token}"
    is_token = mode == "token"
    yield Check("token", is_token, "KubeRay draws it" if is_token else f"{job.at(key)}: {text}")
    given, ours = job.get(f"{CLUSTER}.rayVersion"), importlib.metadata.version("ray")
    where = job.at(f"{CLUSTER}.rayVersion")
    text = f"rayVersion is {given}, and an image of this checkout has {ours}; write {ours}"
    yield Check("ray", given == ours, f"{ours}" if given == ours else f"{where}: {text}")
    yield _result("pods", _pods(job), f"{1 + len(_groups(job))} kinds, of one image")


def _groups(job: Document) -> list[str]:
    """The key of each group of workers."""
    found = job.mappings(f"{CLUSTER}.workerGroupSpecs")
    return [f"{CLUSTER}.workerGroupSpecs.{number}" for number in range(len(found))]


def _pods(job: Document) -> Iterator[str]:
    image = job.get(f"{HEAD}.template.spec.containers.0.image")
    for key in (HEAD, *_groups(job)):
        pod = f"{key}.template.spec"
        if not job.get(f"{pod}.containers.0.image"):
            yield f"{job.at(f'{pod}.containers')}: no container with an image; give it one"
        elif job.get(f"{pod}.containers.0.image") != image:
            text = "another image than the head's; versions of Ray and vLLM have to be equal"
            yield f"{job.at(f'{pod}.containers.0.image')}: {text}"
        if job.get(f"{pod}.enableServiceLinks") is not False:
            text = "Kubernetes would set variables OSD_..., which are no settings; set"
            yield f"{job.at(f'{pod}.enableServiceLinks')}: {text} enableServiceLinks: false"
    for key in _groups(job):
        least, num, most = (
            job.get(f"{key}.{n}") for n in ("minReplicas", "replicas", "maxReplicas")
        )
        if not all(isinstance(each, int) for each in (least, num, most)):
            yield f"{job.at(key)}: replicas, minReplicas and maxReplicas are wanted, as numbers"
        elif not least <= num <= most:
            text = (
                f"minReplicas {least}, replicas {num}, maxReplicas {most} do not rise; set them so"
            )
            yield f"{job.at(f'{key}.minReplicas')}: {text}"


def _resources(job: Document, config: Config) -> Iterator[str]:
    """What the configuration asks of pods and none has."""
    for resource, num_gpus in asked_of_machines(config).items():
        among = _groups(job) if resource else [HEAD]
        having = [key for key in among if not resource or _custom(job, key).get(resource)]
        if not having:
            key = "trainer" if resource == config.ray.trainer_resource else "replica"
            yield (
                f"{job.at(f'{CLUSTER}.workerGroupSpecs')}: no group of workers has the resource "
                f"{resource}, which ray.{key}_resource asks for; give one resources: "
                f'{{{resource}: "1"}}'
            )
        elif resource and not any(job.get(f"{key}.replicas") for key in having):
            where = job.at(f"{having[0]}.replicas")
            yield f"{where}: no pod is started with the resource {resource}; raise replicas"
        elif (most := max(_gpus(job, key) for key in having)) < num_gpus:
            where = job.at(f"{having[0]}.template.spec.containers.0.resources.limits.{GPU}")
            yield f"{where}: {num_gpus:g} GPUs are asked for, and a pod has {most:g}; raise {GPU}"


def _custom(job: Document, group: str) -> dict[str, Any]:
    """Custom resources of a group's pods. They may stand in Ray's own words, as text."""
    found = job.mapping(f"{group}.resources")
    text = str(job.mapping(f"{group}.rayStartParams").get("resources", "{}"))
    try:
        started = json.loads(text.strip("'"))
        started = json.loads(started) if isinstance(started, str) else started
    except ValueError:
        started = {}
    return found | (started if isinstance(started, dict) else {})


def _gpus(job: Document, group: str) -> float:
    limits = job.mapping(f"{group}.template.spec.containers.0.resources.limits")
    try:
        return float(limits.get(GPU, 0))
    except (TypeError, ValueError):
        return 0.0


# -- what names what ------------------------------------------------------------------------------


def _references(documents: Sequence[Document]) -> Iterator[str]:
    """Documents that are named and are not there, and keys that these have not."""
    there = {(str(d.get("kind")), str(d.get("metadata.name"))): d for d in documents}
    for document in documents:
        for key, value in document.walk():
            field = key.rpartition(".")[2]
            if field not in NAMED or not isinstance(value, dict) or value.get("optional"):
                continue
            kind, name_of = NAMED[field]
            if not isinstance(name := value.get(name_of), str):
                continue
            where = document.at(f"{key}.{name_of}")
            found, wanted = there.get((kind, name)), value.get("key")
            if found is None:
                yield f"{where}: no {kind} {name} in this file; add it"
            elif wanted and str(wanted) not in _data(found):
                yield f"{document.at(f'{key}.key')}: {kind} {name} has no {wanted}; add it there"


def _data(document: Document) -> dict[str, Any]:
    return document.mapping("data") | document.mapping("stringData")


def _services(documents: Sequence[Document], job: Document, config: Config) -> Iterator[str]:
    """Services that reach no pod or another port than the service's; addresses that are none."""
    services = [document for document in documents if document.get("kind") == "Service"]
    head = job.mapping(f"{HEAD}.template.metadata.labels")
    pods = [head, *(job.mapping(f"{key}.template.metadata.labels") for key in _groups(job))]
    pods += [document.mapping("spec.template.metadata.labels") for document in documents]
    ports = {"serving": config.serving.port, "control": config.control.port}
    open_ports: list[Any] = []
    for service in services:
        selector = service.mapping("spec.selector")
        if not any(_selects(selector, pod) for pod in pods):
            text = "no pod of this file has these labels; write a selector that one has"
            yield f"{service.at('spec.selector')}: {text}"
        elif _selects(selector, head):
            for number, port in enumerate(service.mappings("spec.ports")):
                reached = port.get("targetPort", port.get("port"))
                if isinstance(reached, str):
                    if reached not in (named := _named_ports(job)):
                        where = service.at(f"spec.ports.{number}.targetPort")
                        text = f"no container of the head has a port named {reached}"
                        yield f"{where}: {text}; write its number, or name it there"
                        continue
                    reached = named[reached]
                open_ports.append(reached)
                if reached not in ports.values():
                    said = " nor ".join(f"{name}.port={each}" for name, each in ports.items())
                    where = service.at(f"spec.ports.{number}.port")
                    yield f"{where}: {reached} is neither {said}; write one of them"
    for name, number in ports.items():
        if number not in open_ports:
            yield f"{job.at('')}: no Service leads to {name}.port={number}; add it to one"
        elif is_loopback(host := getattr(config, name).host):
            yield f"{job.at('spec.entrypoint')}: {name}.host={host} lets no Service in; set 0.0.0.0"
    yield from _addresses(services, job, config)


def _named_ports(job: Document) -> dict[str, Any]:
    """Name -> number, of all containers of the head."""
    containers = f"{HEAD}.template.spec.containers"
    return {
        str(port.get("name")): port.get("containerPort")
        for number in range(len(job.mappings(containers)))
        for port in job.mappings(f"{containers}.{number}.ports")
    }


def _selects(selector: dict[str, Any], labels: dict[str, Any]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _addresses(services: Sequence[Document], job: Document, config: Config) -> Iterator[str]:
    """Whether a Redis that is named like a Service is one."""
    there = {
        (str(service.get("metadata.name")), str(port.get("port")))
        for service in services
        for port in service.mappings("spec.ports")
    }
    key = f"{CLUSTER}.gcsFaultToleranceOptions.redisAddress"
    named = {"redisAddress": (key, str(job.get(key) or ""))}
    where = kuberay_serve.place_of(job, "OSD_BUFFER__REDIS_URL")
    named["buffer.redis_url"] = (where, config.buffer.redis_url)
    for name, (place, address) in named.items():
        server = address.rpartition("://")[2].partition("/")[0].rpartition("@")[2]
        host, _, port = server.partition(":")
        port = port or "6379"
        if host and "." not in host and (host, port) not in there:
            yield f"{job.at(place)}: {name}: no Service {host} with port {port}; name one"
