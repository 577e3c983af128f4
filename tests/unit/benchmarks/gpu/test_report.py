"""The report says what was found, where, and by whom is not in it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import hardware
from benchmarks.gpu.findings import FAILED, NOT_MEASURED, NOT_RUN, PASSED, Figure, Outcome
from benchmarks.gpu.report import Cleaner, Report, markdown, own_names, write
from tests.support.gpu_checks import a_check
from tests.support.paths import ROOT

OUTCOMES = (
    Outcome(
        check="swap",
        verdict=PASSED,
        seconds=42,
        figures=(
            Figure(name="pause", value=7.123456, unit="ms", is_of_gpu=True, is_key=True),
            Figure(name="swaps", value=30, goal="= 30", is_met=True),
        ),
        details=("graphs FULL 120",),
        log_tail="a | b",
    ),
    Outcome(
        check="k",
        verdict=FAILED,
        reason="k | j: 3, wanted = 4",
        seconds=5,
        figures=(Figure(name="k | j", value=3, goal="= 4", is_met=False),),
    ),
    Outcome(check="late", verdict=NOT_RUN, reason="out of time"),
    Outcome(
        check="dry",
        verdict=NOT_MEASURED,
        reason="its code ran on the CPU",
        seconds=3,
        figures=(Figure(name="step", value=None, unit="ms", is_of_gpu=True, is_key=True),),
    ),
)


def report(**fields: Any) -> Report:
    values: dict[str, Any] = {
        "machine": {"date": "2026-11-23", "GPU": "H100, driver 570"},
        "outcomes": OUTCOMES,
        "checks": {o.check: a_check(o.check) for o in OUTCOMES},
        "seconds": 321.4,
        "models": "random",
        "is_dry": False,
    }
    return Report(**(values | fields))


def test_it_begins_with_the_machine_then_the_table_then_details() -> None:
    page = markdown(report())
    places = [page.index(t) for t in ("# OSD on a GPU\n", "H100, driver 570", "## Checks", "## k")]
    assert places == sorted(places)
    assert "1 passed, 1 failed, 1 not run, 1 not measured: no GPU; 321 s." in page


def row(page: str, name: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))


def test_the_table_tells_verdict_key_figures_and_meaning() -> None:
    page = markdown(report())
    shown = "swap: shown. Passed: well."
    assert row(page, "swap") == f"| `swap` | **passed** | pause: 7.123 ms | {shown} |"
    assert row(page, "k").startswith(r"| `k` | **failed**: k \| j: 3, wanted = 4 | k \| j: 3 |")
    assert row(page, "late").startswith("| `late` | **not run**: out of time |  |")
    assert "**not measured: no GPU** (its code ran on the CPU) | step: not measured: no GPU |" in (
        row(page, "dry")
    )


def test_details_hold_every_figure_with_its_goal_and_the_log() -> None:
    page = markdown(report())
    assert "| swaps | 30 | = 30 | met |" in page
    assert r"| k \| j | 3 | = 4 | **missed** |" in page
    assert "* graphs FULL 120" in page
    assert "```\na | b\n```" in page
    assert "## late" not in page  # it never began


def test_a_dry_run_says_so_first() -> None:
    page = markdown(report(is_dry=True))
    assert page.startswith("# OSD on a GPU: dry run on the CPU\n")
    assert "no figure of this page is one of a GPU" in page


def test_the_json_beside_it_holds_the_same(tmp_path: Path) -> None:
    page = write(report(), tmp_path)
    assert page.read_text() == markdown(report())
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema_version"] == 1
    assert [c["verdict"] for c in data["checks"]] == [o.verdict for o in OUTCOMES]
    assert data["checks"][0]["figures"][0]["value"] == 7.123456
    assert data["is_dry_run"] is False


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f'File "{ROOT}/serving/worker.py", line 3', 'File "serving/worker.py", line 3'),
        (
            f'File "{ROOT}/.venv/lib/python3.11/site-packages/vllm/v1/core.py"',
            'File "vllm/v1/core.py"',
        ),
        ("/opt/conda/lib/python3.12/site-packages/torch/x.py:7", "torch/x.py:7"),
        ("model='/data/acme/secret-70b', dtype=bf16", "model='<path>', dtype=bf16"),
        ("~/models/secret is not there", "<path> is not there"),
        ("tcp://10.1.2.3:4567", "tcp://<address>:4567"),
        ("GPU-8f6c1f6e-aaaa-bbbb-cccc-0123456789ab", "<GPU>"),
        (
            "KV cache 12.5 GiB/80 GiB, 3/4 steps, 0.32.0",
            "KV cache 12.5 GiB/80 GiB, 3/4 steps, 0.32.0",
        ),
        ("see https://github.com/vllm-project/vllm", "see https://github.com/vllm-project/vllm"),
        ("secret-model is loaded", "<path> is loaded"),
    ],
)
def test_places_and_addresses_are_taken_out(text: str, clean: str) -> None:
    assert Cleaner(["secret-model"])(text) == clean


def test_names_of_host_and_user_are_taken_out(tmp_path: Path) -> None:
    log = "[gpu-box-7.lab] worker of alice on gpu-box-7; alice's malice; root cause"
    outcome = Outcome(check="swap", verdict=PASSED, seconds=1, log_tail=log, details=(log,))
    names = ["gpu-box-7", "gpu-box-7.lab", "alice", "root", ""]
    page = write(report(outcomes=(outcome,)), tmp_path, names=names)
    clean = "[<name>] worker of <name> on <name>; <name>'s malice; root cause"
    for text in (page.read_text(), (tmp_path / "report.json").read_text()):
        assert text.count(clean) == 2
        assert "gpu-box" not in text


def test_the_names_are_those_of_this_machine() -> None:
    assert {socket.gethostname(), Path.home().name} <= set(own_names())


def test_the_machine_is_told_without_its_name() -> None:
    found = hardware.describe("cpu")
    assert found["GPU"] == "none used: a dry run on the CPU"
    assert "torch 2" in found["versions"] and "vllm" in found["versions"]
    assert found["OSD"].startswith("commit ")
    assert Cleaner().values(found) == found
