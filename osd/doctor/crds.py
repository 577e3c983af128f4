"""Fields of a manifest against the definitions of Kubernetes' kinds (CRDs).

A definition alone would let a misspelt field pass: Kubernetes drops what it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from osd.doctor.documents import Document, documents_of
from osd.errors import ConfigError

Schema = Mapping[str, Any]
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
CLUSTERS = {"ray.io/v1 RayCluster": "spec", "ray.io/v1 RayJob": "spec.rayClusterSpec"}
"""Kinds that hold a Ray cluster, and where."""
POD = "headGroupSpec.template"
"""Where a Ray cluster has what every pod has."""


def schemas_of(folder: Path) -> dict[str, Schema]:
    """ "ray.io/v1 RayJob" -> its definition, of every one in a folder. Raises `ConfigError` where
    there is none of KubeRay's."""
    found: dict[str, Schema] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        for document in documents_of(path):
            if document.get("kind") == "CustomResourceDefinition":
                kind, group = document.get("spec.names.kind"), document.get("spec.group")
                for version in document.get("spec.versions"):
                    schema = version["schema"]["openAPIV3Schema"]
                    found[f"{group}/{version['name']} {kind}"] = schema
    if not found.keys() & CLUSTERS.keys():
        raise ConfigError(
            f"{folder}: has no definition of RayJob (ray.io/v1); put there what "
            "`kubectl get crd rayjobs.ray.io -o yaml` says"
        )
    return found


def problems(document: Document, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, str]]:
    """Key and fault of every field that no definition has, or has otherwise. Kinds without a
    definition are passed over, but for the pods in them."""
    for key, schema in _parts(document, schemas):
        value = document.get(key) if key else document.content
        yield from _problems(value, schema, f"{key}." if key else "")


def has_definition(document: Document, schemas: Mapping[str, Schema]) -> bool:
    return _name(document) in schemas


def _parts(document: Document, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    if has_definition(document, schemas):
        yield "", schemas[_name(document)]
        return
    cluster = next(_inner(schemas[name], key) for name, key in CLUSTERS.items() if name in schemas)
    if document.get("kind") == "RayJob" and document.get("spec.rayClusterSpec") is not None:
        yield "spec.rayClusterSpec", cluster
    elif document.get("spec.template.spec.containers") is not None:
        yield "spec.template", _inner(cluster, POD)


def _name(document: Document) -> str:
    return f"{document.get('apiVersion')} {document.get('kind')}"


def _inner(schema: Schema, key: str) -> Schema:
    for name in key.split("."):
        schema = schema["properties"][name]
    return schema


def _problems(value: Any, schema: Schema, prefix: str) -> Iterator[tuple[str, str]]:
    key, name = prefix.rstrip("."), prefix.rstrip(".").rpartition(".")[2]
    if value is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if problem := _own_problem(value, schema):
        yield key, f"{name} {problem}"
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _problems(each, schema.get("items", {}), f"{prefix}{number}.")
    elif isinstance(value, dict):
        for field in schema.get("required", ()):
            if field not in value:
                yield key, f"{name or 'the document'} has no {field}, which it needs"
        for field, each in value.items():
            inner = _field(schema, field)
            if inner is None:
                yield f"{prefix}{field}", f"{field}: no such field{_suggest(field, schema)}"
            else:
                yield from _problems(each, inner, f"{prefix}{field}.")


def _field(schema: Schema, field: str) -> Schema | None:
    """The definition of a field; None where there is none."""
    known: Schema = schema.get("properties", {})
    if field in known:
        return dict(known[field])
    free = schema.get("additionalProperties", not known)
    return (free if isinstance(free, dict) else {}) if free else None


def _own_problem(value: Any, schema: Schema) -> str:
    """What is wrong with a value, but for what is in it."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            return f"is {value!r}; it must be a number or text"
    elif problem := _of_other_type(value, str(schema.get("type", ""))):
        return problem
    if "enum" in schema and value not in schema["enum"]:
        return f"is {value!r}; it must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"is {value!r}; it must match {schema['pattern']}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return f"is {value}; it must be at least {schema['minimum']}"
    return ""


def _of_other_type(value: Any, name: str) -> str:
    wanted = TYPES.get(name)
    if wanted is None or (
        isinstance(value, wanted) and isinstance(value, bool) == (bool in wanted)
    ):
        return ""
    remedy = "; quote it" if wanted == (str,) and not isinstance(value, dict | list) else ""
    return f"must be of type {name}, not {type(value).__name__}{remedy}"


def _suggest(field: str, schema: Schema) -> str:
    import difflib

    near = difflib.get_close_matches(field, schema.get("properties", {}), 1)
    return f"; did you mean {near[0]}?" if near else "; take it out"
