"""The Grafana dashboard can be imported, and asks for nothing that does not exist."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support import promtool
from tests.support.paths import ROOT
from tests.support.promtool import OF_A_TARGET, OURS, PROMETHEUS, named

FILE = ROOT / "configs" / "grafana" / "osd.json"
BOARD = json.loads(FILE.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}

OF_VLLM = ("model_name", "engine")
VLLM = {
    "vllm:time_to_first_token_seconds_bucket": ("le", *OF_VLLM),
    "vllm:request_time_per_output_token_seconds_bucket": ("le", *OF_VLLM),
    "vllm:generation_tokens_total": OF_VLLM,
    "vllm:prompt_tokens_total": OF_VLLM,
    "vllm:num_requests_running": OF_VLLM,
    "vllm:num_requests_waiting": OF_VLLM,
}
"""vLLM's own series, from the service port, under the names that the installed vLLM gives them (a
test) -> labels."""


def expressions() -> Iterator[tuple[str, str, str]]:
    """(where it stands, the expression, its legend)."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"], annotation["titleFormat"]
    for variable in BOARD["templating"]["list"]:
        found = re.fullmatch(r"label_values\(([\w:]+), instance\)", variable["query"]["query"])
        assert found, "the only form in use"
        yield variable["name"], found[1], ""


ALL = list(expressions())
KNOWN = OURS | PROMETHEUS | VLLM


@pytest.mark.parametrize(
    ("where", "expression", "legend"),
    ALL,
    ids=[f"{title}-{n}" for n, (title, *_) in enumerate(ALL)],
)
def test_every_series_and_label_exists(where: str, expression: str, legend: str) -> None:
    found = named(expression)
    assert found.series and found.series <= set(KNOWN)
    labels = set().union(*(KNOWN[name] for name in found.series))
    assert found.labels <= labels | OF_A_TARGET
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (found.labels if "sum" in expression else labels), (
        "a legend names a label that is there"
    )


def test_the_names_of_vllm_are_those_of_the_installed_one() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    for name in VLLM:
        assert f'name="{re.sub("_(bucket|total)$", "", name)}"' in source


def test_promtool_understands_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"osd:dashboard:{n}", "expr": re.sub(r"\$__\w+", "5m", expression)}
        for n, (_, expression, _) in enumerate(ALL)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool.run("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALL)} rules found" in checked.stdout


def test_it_can_be_imported_and_takes_its_source_from_whoever_imports_it() -> None:
    assert (BOARD["uid"], BOARD["id"]) == ("osd-overview", None)
    assert [(i["name"], i["pluginId"]) for i in BOARD["__inputs"]] == [
        ("DS_PROMETHEUS", "prometheus")
    ]
    users: list[dict[str, Any]] = [
        *PANELS,
        *(target for panel in PANELS for target in panel["targets"]),
    ]
    users += [*BOARD["annotations"]["list"], *BOARD["templating"]["list"]]
    assert all(user["datasource"] == SOURCE for user in users)
    needed = {r["id"] for r in BOARD["__requires"] if r["type"] == "panel"}
    assert needed == {panel["type"] for panel in PANELS}
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    asked = set(re.findall(r'="\$(\w+)"', " ".join(expression for _, expression, _ in ALL)))
    assert asked == variables


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["description"] for panel in PANELS)
    for one, two in combinations((panel["gridPos"] for panel in BOARD["panels"]), 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in BOARD["panels"])
