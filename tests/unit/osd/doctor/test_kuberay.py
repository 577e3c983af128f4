"""`osd cluster check` of a manifest for KubeRay: one that is right, and what is said of faults.

Fields are checked against KubeRay's own definitions, which are not the project's: the folder that
`KUBERAY_CRDS` names has them (`kubectl get crd rayjobs.ray.io rayclusters.ray.io -o yaml`, each
in a file of its own). Without it, the tests of a small definition say how that is done.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from osd.cli import app
from osd.doctor import crds, kuberay, kuberay_serve
from osd.doctor.documents import Document, documents_of
from osd.errors import ConfigError
from tests.support.filled_in import filled_in, line_of
from tests.support.paths import ROOT

FILE = ROOT / "configs/kuberay.yaml"
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
WORDS = {
    "IMAGE": "registry.example/osd:1",
    "PASSWORD": "open-sesame",
    "TARGET": "owner/target",
    "DRAFT": "owner/draft",
}
CRDS = Path(os.environ.get("KUBERAY_CRDS", ""))
needs_crds = pytest.mark.skipif(
    not os.environ.get("KUBERAY_CRDS"),
    reason="KUBERAY_CRDS names no folder with KubeRay's definitions: fields are not checked",
)


def shipped() -> str:
    return filled_in(FILE.read_text(), WORDS)


TABLES = """\
    gcsFaultToleranceOptions:
      redisAddress: osd-valkey:6379
      redisPassword:
        valueFrom:
          secretKeyRef: {name: osd-valkey, key: password}
"""


def with_tables_in_valkey() -> str:
    """The same, but Ray's head keeps its tables in Valkey."""
    text, place = shipped(), "    headGroupSpec:"
    assert text.count(place) == 1 and "gcsFaultToleranceOptions:" not in text
    return text.replace(place, TABLES + place)


def broken(folder: Path, text: str, definitions: Path | None = None) -> list[str]:
    path = folder / "kuberay.yaml"
    path.write_text(text)
    found = kuberay.checks(documents_of(path), definitions)
    return [f"{check.name}: {check.text}" for check in found if check.ok is False]


def test_what_is_shipped_is_right_when_it_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "kuberay.yaml"
    path.write_text(shipped())
    result = CliRunner().invoke(app, ["cluster", "check", str(path)])
    assert result.exit_code == 0 and result.output.endswith("nothing is broken\n"), result.output
    assert "configuration    target owner/target, every key is known" in result.output
    assert " ·  fields           not checked; --crds DIR names KubeRay's def" in result.output


def test_each_word_that_is_not_filled_in_is_named_with_its_line() -> None:
    result = CliRunner().invoke(app, ["cluster", "check", str(FILE)])
    assert result.exit_code == 1 and result.output.endswith("broken: filled in\n")
    left = [
        f"line {number}: fill in {word}"
        for number, line in enumerate(FILE.read_text().splitlines(), 1)
        for word in WORDS
        if line.endswith(f": {word}")
    ]
    assert len(left) == 5 and f"filled in        {'; '.join(left)}\n" in result.output


def test_it_is_as_the_project_has_it() -> None:
    """What the checks do not compare: the version of Ray, and what is said of it."""
    text = FILE.read_text()
    assert f'rayVersion: "{importlib.metadata.version("ray")}"' in text
    assert "This file is validated" in text and "it was not run" in text
    (job,) = [d for d in documents_of(FILE) if d.get("kind") == "RayJob"]
    config = kuberay_serve.configuration(documents_of(FILE), job)
    assert config.buffer.redis_url == "redis://:$(VALKEY_PASSWORD)@osd-valkey:6379/0"
    assert (config.ray.address, config.ray.trainer_resource) == ("auto", "train")
    assert str(config.data_path) == "/data/osd", "on the volume"


Case = tuple[str, str, str, str]
CASES: list[Case] = [
    # what is replaced, by what, where that stands, what is said
    (
        "kind: Secret\n",
        "",
        "apiVersion: v1\nmetadata",
        "documents: {at}: this document has no kind",
    ),
    ("metadata:\n  name: osd-trainer\n", "", "", "this document has no metadata.name"),
    ("kind: RayJob", "kind: RayService", "kind: RayService", "job: {at}: a RayService runs appli"),
    ("kind: RayJob", "kind: RayCluster", "", "one RayJob with a rayClusterSpec is needed"),
    ("rayClusterSpec:", "clusterSpec:", "spec:", "one RayJob with a rayClusterSpec is needed"),
    ("mode: token", "mode: disabled", "mode: disabled", "token: {at}: whoever reaches Ray's ports"),
    ("authOptions:", "authOption:", "  rayClusterSpec:", "token: {at}: whoever reaches Ray's por"),
    ('rayVersion: "2', 'rayVersion: "1', "rayVersion:", "ray: {at}: rayVersion is 1."),
    (
        "image: registry.example/osd:1\n                env",
        "image: other\n                env",
        "image: other",
        "pods: {at}: another image than the head's",
    ),
    ("          enableServiceLinks: false", "", "spec:\n  # else", "pods: {at}: Kubernet"),
    (
        "enableServiceLinks: false\n            containers",
        "enableServiceLinks: true\n            containers",
        "enableServiceLinks: true",
        "pods: {at}: Kubernetes would set variables OSD_",
    ),
    (
        "minReplicas: 1",
        "minReplicas: 2",
        "minReplicas",
        "pods: {at}: minReplicas 2, replicas 1, max",
    ),
    (
        "replicas: 1\n        minReplicas: 1",
        "replicas: 0\n        minReplicas: 0",
        "replicas: 0",
        "resources: {at}: no pod is started with the resource train; raise replicas",
    ),
    ("maxReplicas: 1\n", "\n", "- groupName", "pods: {at}: replicas, minReplicas and maxReplicas"),
    (
        'resources: {train: "1"}',
        "resources: {}",
        "workerGroupSpecs",
        "resources: {at}: no group of",
    ),
    ("trainer_resource: train", "trainer_resource: fast", "workerGroupSpecs", "the resource fast"),
    (
        "num_gpus: 1\n    trainer",
        "num_gpus: 2\n    trainer",
        "limits: {memory: 24Gi",
        "resources: {at}: 2 GPUs are asked for, and a pod has 1; raise nvidia.com/gpu",
    ),
    (
        "trainer:\n      num_gpus: 1",
        "trainer:\n      num_gpus: 4",
        "limits: {memory: 16Gi",
        "resources: {at}: 4 GPUs are asked for, and a pod has 1",
    ),
    (
        "kind: Secret\nmetadata:\n  name: osd-valkey",
        "kind: Secret\nmetadata:\n  name: other",
        "secretKeyRef",
        "references: {at}: no Secret osd-valkey in this file; add it",
    ),
    (
        "stringData:\n  password",
        "stringData:\n  pasword",
        "secretKeyRef",
        "Secret osd-valkey has no pa",
    ),
    (
        "kind: ConfigMap\nmetadata:\n  name: osd\n",
        "kind: ConfigMap\nmetadata:\n  name: conf\n",
        "configMap: {name: osd}",
        "references: {at}: no ConfigMap osd in this file; add it",
    ),
    (
        "claimName: osd-trainer",
        "claimName: osd-train",
        "osd-train}",
        "no PersistentVolumeClaim osd-tr",
    ),
    (
        "entrypoint: osd serve",
        "entrypoint: osd top",
        "entrypoint",
        "configuration: {at}: entrypoint: ",
    ),
    ("--address auto", "--detach", "entrypoint", "{at}: entrypoint: --detach would end the job"),
    (
        "--address auto",
        "",
        "entrypoint",
        "{at}: ray.address=local would start a second Ray; add --ad",
    ),
    (
        "--address auto",
        "--adress auto",
        "entrypoint",
        "{at}: entrypoint: --adress: `osd serve` has no",
    ),
    (
        "/etc/osd/osd.yaml",
        "/etc/osd/else.yaml",
        "entrypoint",
        "/etc/osd/else.yaml is in no ConfigMap",
    ),
    (
        "mountPath: /etc/osd",
        "mountPath: /etc/other",
        "entrypoint",
        "{at}: entrypoint: /etc/osd/osd.ya",
    ),
    (
        "      target: owner",
        "      targt: owner",
        "targt",
        "configuration: {at}: serving.targt (/etc/",
    ),
    (
        "host: 0.0.0.0\n      num",
        "port: x\n      num",
        "port: x",
        "{at}: serving.port='x' (/etc/osd/",
    ),
    ("    trainer:\n", "    trainer: {\n", "control:", "configuration: line "),
    (
        "OSD_BUFFER__REDIS_URL",
        "OSD_BUFFER__REDIS_URI",
        "REDIS_URI",
        "configuration: {at}: environment",
    ),
    (
        "@osd-valkey:6379/0",
        "@localhost:6379/0",
        "trainer_resource",
        "name it by an address that both",
    ),
    (
        "- {name: OSD_BUFFER__REDIS_URL",
        "- {name: REDIS",
        "trainer_resource",
        "{at}: ray.trainer_resou",
    ),
    (
        "@osd-valkey:6379/0",
        "@valkey:6379/0",
        "OSD_BUFFER__REDIS_URL",
        "buffer.redis_url: no Service v",
    ),
    (
        "redisAddress: osd-valkey",
        "redisAddress: redis",
        "redisAddress",
        "{at}: redisAddress: no Servic",
    ),
    (
        "port: 8000}",
        "port: 8080}",
        "port: 8080}",
        "services: {at}: 8080 is neither serving.port=8000",
    ),
    (
        "port: 8001}\n---",
        "port: 8001, targetPort: 81}\n---",
        "targetPort: 81",
        "{at}: 81 is neither",
    ),
    (
        "port: 8001}\n---",
        "port: 8001, targetPort: contrl}\n---",
        "targetPort: contrl",
        "services: {at}: no container of the head has a port named contrl; write its number",
    ),
    (
        "port: 8001}\n---",
        "port: 8001, targetPort: gcs}\n---",
        "targetPort: gcs",
        "services: {at}: 6379 is neither serving.port=8000",
    ),
    (
        "    - {name: control, port: 8001}\n",
        "",
        "kind: RayJob",
        "no Service leads to control.port=8001",
    ),
    (
        "selector: {osd-part: head}",
        "selector: {osd-part: haed}",
        "haed}",
        "services: {at}: no pod of t",
    ),
    (
        "selector: {osd-part: head}",
        "selctor: {osd-part: head}",
        "selctor",
        "no pod of this file has th",
    ),
    (
        "      host: 0.0.0.0\n    ray",
        "      host: 127.0.0.1\n    ray",
        "entrypoint",
        "control.host=127.0",
    ),
]


@pytest.mark.parametrize(("old", "new", "at", "says"), CASES)
def test_what_is_broken_is_named_with_its_line_and_remedy(
    tmp_path: Path, old: str, new: str, at: str, says: str
) -> None:
    text = with_tables_in_valkey()
    assert old in text
    text = text.replace(old, new, 1)
    found = broken(tmp_path, text)
    lines = [
        text[:start].count("\n") + 1 for start in range(len(text)) if text.startswith(at, start)
    ]
    wanted = {says.format(at=f"line {number}") for number in lines if at} or {says}
    assert any(each in said for each in wanted for said in found), found
    assert all("\n" not in said for said in found)


def keys_of(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else []
    for key, each in enumerate(value) if isinstance(value, list) else parts:
        yield (*before, key)
        yield from keys_of(each, (*before, key))


def test_no_value_at_any_place_is_worse_than_a_line(tmp_path: Path) -> None:
    values = itertools.cycle([None, "x", [], {}, 5, [1], [None], {"a": 1}, "[1]"])
    documents = [document.content for document in documents_of(FILE)]
    num_keys = 0
    for number, content in enumerate(documents):
        for *outer, last in keys_of(content):
            changed = deepcopy(documents)
            place: Any = changed[number]
            for key in outer:
                place = place[key]
            place[last] = next(values)
            text = yaml.dump_all(changed, Dumper=Dumper)
            assert all("\n" not in said for said in broken(tmp_path, text))
            num_keys += 1
    assert num_keys > 200


def test_what_ray_has_in_its_own_words_is_read_too(tmp_path: Path) -> None:
    own = """rayStartParams: {resources: '"{\\"train\\": 1}"'}"""
    text = shipped().replace('rayStartParams: {}\n        resources: {train: "1"}', own)
    assert own in text and broken(tmp_path, text) == []


def test_a_service_may_name_the_port_of_a_container(tmp_path: Path) -> None:
    text = shipped().replace("port: 8001}\n---", "port: 80, targetPort: control}\n---", 1)
    assert "targetPort: control" in text and broken(tmp_path, text) == []


def test_ray_may_keep_its_tables_in_valkey(tmp_path: Path) -> None:
    assert broken(tmp_path, with_tables_in_valkey()) == []


@pytest.mark.parametrize(
    ("entrypoint", "config", "flags", "overrides"),
    [
        ("osd serve", "", {}, []),
        ("/opt/venv/bin/osd serve -c a.yaml", "a.yaml", {}, []),
        ("osd serve --config=a.yaml t --draft d", "a.yaml", "serving.target serving.draft", []),
        (
            "osd serve t serving.port=1 --port 9",
            "",
            "serving.target serving.port",
            ["serving.port=1"],
        ),
    ],
)
def test_a_command_line_is_read_as_osd_serve_reads_it(
    entrypoint: str, config: str, flags: str, overrides: list[str]
) -> None:
    command = kuberay_serve.command_of(entrypoint)
    assert (command.config, command.overrides) == (config, overrides)
    assert sorted(command.flags) == sorted(flags.split() if flags else [])


@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        ("", "nothing, and not `osd serve ...`"),
        ("osd serve 'a", "no command line"),
        ("osd serve a b", "b: a second target"),
        ("osd serve --config", "--config without a value; give it one"),
    ],
)
def test_a_command_line_that_is_none_is_one_line(entrypoint: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", "[.]")):
        kuberay_serve.command_of(entrypoint)


def test_options_are_those_of_osd_serve() -> None:
    from typer.main import get_command

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    shown = [p for p in serve.params if not getattr(p, "hidden", False)]
    options = {o for p in shown for o in p.opts if o.startswith("-")}
    assert options == {*kuberay_serve.FLAGS, "--config", "-c", "--detach", "--help"} - {"--help"}


# -- fields ---------------------------------------------------------------------------------------

DEFINITION = {
    "kind": "CustomResourceDefinition",
    "spec": {
        "group": "ray.io",
        "names": {"kind": "RayJob"},
        "versions": [{"name": "v1", "schema": {"openAPIV3Schema": {
            "type": "object",
            "properties": {
                "kind": {"type": "string"},
                "apiVersion": {"type": "string"},
                "metadata": {"type": "object"},
                "spec": {
                    "type": "object",
                    "required": ["entrypoint"],
                    "properties": {
                        "entrypoint": {"type": "string", "pattern": "^osd"},
                        "mode": {"enum": ["HTTPMode", "K8sJobMode"], "type": "string"},
                        "backoffLimit": {"type": "integer", "minimum": 0},
                        "suspend": {"type": "boolean"},
                        "port": {"x-kubernetes-int-or-string": True},
                        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                        "ports": {"type": "array", "items": {
                            "type": "object", "properties": {"port": {"type": "integer"}}}},
                        "rayClusterSpec": {"type": "object", "properties": {
                            "headGroupSpec": {"type": "object", "properties": {
                                "template": {"type": "object", "properties": {
                                    "spec": {"type": "object", "properties": {
                                        "containers": {"type": "array"}}}}}}}}},
                    },
                },
            },
        }}}],
    },
}  # fmt: skip


@pytest.fixture
def definitions(tmp_path: Path) -> Path:
    folder = tmp_path / "crds"
    folder.mkdir()
    (folder / "rayjobs.yaml").write_text(yaml.safe_dump(DEFINITION))
    return folder


def job(folder: Path, spec: str, kind: str = "RayJob") -> Document:
    path = folder / "job.yaml"
    path.write_text(f"apiVersion: ray.io/v1\nkind: {kind}\nmetadata: {{name: a}}\nspec:\n{spec}\n")
    (document,) = documents_of(path)
    return document


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("  entrypoint: osd serve\n  labels: {a: b}\n  free: {a: {b: 1}}\n  port: http", None),
        ("  entrypoint: osd serve\n  port: 80\n  ports: [{port: 80}]\n  suspend: false", None),
        ("  mode: HTTPMode", "line 4: spec has no entrypoint, which it needs"),
        ("  entrypoint: ray", "line 5: entrypoint is 'ray'; it must match ^osd"),
        (
            "  entrypoint: osd\n  entrypont: a",
            "line 6: entrypont: no such field; did you mean entrypoi",
        ),
        ("  entrypoint: osd\n  xyz: a", "line 6: xyz: no such field; take it out"),
        (
            "  entrypoint: osd\n  mode: Http",
            "line 6: mode is 'Http'; it must be one of HTTPMode, K8s",
        ),
        (
            "  entrypoint: osd\n  backoffLimit: -1",
            "line 6: backoffLimit is -1; it must be at least 0",
        ),
        ("  entrypoint: osd\n  backoffLimit: '1'", "backoffLimit must be of type integer, not str"),
        ("  entrypoint: osd\n  backoffLimit: true", "must be of type integer, not bool"),
        ("  entrypoint: osd\n  suspend: 1", "line 6: suspend must be of type boolean, not int"),
        ("  entrypoint: osd\n  labels: {a: 1}", "a must be of type string, not int; quote it"),
        ("  entrypoint: osd\n  labels: [a]", "labels must be of type object, not list"),
        ("  entrypoint: osd\n  port: true", "port is True; it must be a number or text"),
        (
            "  entrypoint: osd\n  ports:\n  - port: 1\n  - prot: 2",
            "line 8: prot: no such field; did",
        ),
    ],
)
def test_a_field_is_as_it_is_defined(
    tmp_path: Path, definitions: Path, spec: str, says: str | None
) -> None:
    document = job(tmp_path, spec)
    found = crds.problems(document, crds.schemas_of(definitions))
    told = [f"{document.at(key)}: {problem}" for key, problem in found]
    assert (told == []) if says is None else (len(told) == 1 and says in told[0]), told


def test_pods_of_other_kinds_are_looked_at_too(tmp_path: Path, definitions: Path) -> None:
    spec = "  template:\n    spec:\n      containers: []\n      contaners: []"
    found = list(crds.problems(job(tmp_path, spec, "Deployment"), crds.schemas_of(definitions)))
    assert found == [
        ("spec.template.spec.contaners", "contaners: no such field; did you mean containers?")
    ]


def test_a_folder_without_definitions_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no definition of RayJob .ray.io/v1.; put there"):
        crds.schemas_of(tmp_path)


# -- KubeRay's own definitions --------------------------------------------------------------------


@needs_crds
def test_kuberay_knows_every_field(tmp_path: Path) -> None:
    assert broken(tmp_path, shipped(), CRDS) == []
    assert broken(tmp_path, with_tables_in_valkey(), CRDS) == []


@needs_crds
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("gcsFaultToleranceOptions", "gcsFaultTolerenceOptions"),
        ("redisPassword", "redisPasword"),
        ("headGroupSpec", "headGroup"),
        ("rayStartParams", "rayStartParam"),
        ("containerPort", "contanerPort"),
        ("volumeMounts", "volumeMount"),
        ("persistentVolumeClaim", "persistentVolumeClaims"),
        ("workerGroupSpecs", "workerGroupSpec"),
        ("groupName", "groupname"),
        ("minReplicas", "minReplica"),
        ("readinessProbe", "readynessProbe"),
        ("enableServiceLinks", "enableServiceLink"),
    ],
)
def test_a_misspelt_field_is_named_with_its_line(tmp_path: Path, right: str, wrong: str) -> None:
    text = with_tables_in_valkey().replace(f"{right}:", f"{wrong}:", 1)
    (said,) = [each for each in broken(tmp_path, text, CRDS) if each.startswith("fields: ")]
    assert f"line {line_of(text, f'{wrong}:')}: {wrong}: no such field; " in said


@needs_crds
@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('{train: "1"}', "{train: 1}", "train must be of type string, not int; quote it"),
        ("mode: token", "mode: tokens", "mode is 'tokens'; it must be one of disabled, token"),
        (
            "replicas: 1\n        min",
            "replicas: one\n        min",
            "replicas must be of type integer",
        ),
        ("groupName: trainer\n        ", "", "0 has no groupName, which it needs"),
        ("memory: 24Gi", "memory: 24 Gigs", "memory is '24 Gigs'; it must match"),
    ],
)
def test_a_value_that_kuberay_refuses_is_named(
    tmp_path: Path, right: str, wrong: str, says: str
) -> None:
    text = shipped()
    assert right in text
    (said,) = [
        each
        for each in broken(tmp_path, text.replace(right, wrong, 1), CRDS)
        if each.startswith("fields: ")
    ]
    assert says in said and "line " in said


@needs_crds
def test_the_command_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "kuberay.yaml"
    path.write_text(shipped().replace("groupName: trainer", "groupNam: trainer"))
    command = ["cluster", "check", str(path), "--crds", str(CRDS)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "groupNam: no such field; did you mean group" in result.output
