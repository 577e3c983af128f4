"""What the worker answers about swaps, and which version captured rows bear after one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osd.config.schema import CaptureConfig
from osd.errors import SwapError
from osd.records import DraftRelease, StagingReport, encode
from serving.worker import WorkerExtension, trace_settings
from tests.support.draft_releases import written


class Swapper:
    """Serves version 3; what is asked of it is noted. `problem` is what a commit fails with."""

    def __init__(self, proof: Any = None, problem: str = "") -> None:
        self.version, self.proof, self.problem = 3, proof, problem
        self.staged: list[DraftRelease] = []
        self.staging = StagingReport(version=4, done=True, seconds=0.5)

    def stage(self, release: DraftRelease) -> None:
        self.staged.append(release)

    def commit(self, version: int) -> float:
        if self.problem:
            raise SwapError(self.problem)
        self.version = version
        return 0.25


def worker(swapper: Swapper) -> Any:
    made: Any = WorkerExtension()
    made.osd_swapper, made.osd_capture = swapper, SimpleNamespace(draft_version=3)
    return made


PROVING, BLIND = SimpleNamespace(why_not=""), SimpleNamespace(why_not="other layers")


@pytest.mark.parametrize(("proof", "is_proved"), [(PROVING, True), (BLIND, False), (None, False)])
def test_a_swap_is_answered_with_its_pause_and_rows_bear_the_new_version(
    proof: Any, is_proved: bool
) -> None:
    made = worker(Swapper(proof))
    assert json.loads(made.osd_commit(4)) == {
        "pause_s": 0.25,
        "previous": 3,
        "proved": is_proved,
        "error": "",
    }
    assert made.osd_capture.draft_version == 4


def test_a_failed_swap_is_answered_with_its_reason_and_rows_bear_the_old_version() -> None:
    made = worker(Swapper(PROVING, "v4: no room"))
    expected = {"pause_s": 0.0, "previous": 3, "proved": False, "error": "v4: no room"}
    assert json.loads(made.osd_commit(4)) == expected
    assert made.osd_capture.draft_version == 3


def test_a_release_is_staged_whole_and_its_staging_told() -> None:
    made = worker(Swapper())
    release = DraftRelease(
        version=4, parent=3, path="/d", sha256="a", target_id="t", created_at=1.0
    )
    assert made.osd_stage(encode(release).decode()) == "{}" and made.osd_swapper.staged == [release]
    assert json.loads(made.osd_staging()) == {
        "version": 4,
        "done": True,
        "error": "",
        "seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("proof", "unproved"), [(PROVING, ""), (BLIND, "other layers"), (None, "")]
)
def test_a_report_says_what_was_counted_and_why_swaps_are_not_proved(
    proof: Any, unproved: str
) -> None:
    made = worker(Swapper(proof))
    asked = []
    assembler = SimpleNamespace(
        rows=Counter(plain=2), skipped=Counter(opt_out=1), num_traces=5, num_running=6
    )
    windows = SimpleNamespace(take=lambda replica, draft: asked.append((replica, draft)) or [])
    made.osd_capture = SimpleNamespace(assembler=assembler, windows=windows)
    made.osd_sink_stats = lambda: {"full": 7}
    made.osd_split = SimpleNamespace(report=lambda: {"draft": 8})
    assert json.loads(made.osd_report("replica-0", "default")) == {
        "windows": [],
        "rows": {"plain": 2},
        "skipped": {"opt_out": 1},
        "num_traces": 5,
        "dropped": {"full": 7},
        "num_running": 6,
        "split": {"draft": 8},
        "unproved": unproved,
    }
    assert asked == [("replica-0", "default")]


def starting(draft: torch.nn.Module, method: str = "draft_model") -> Any:
    """A worker of vLLM with this draft, before it was hooked. Settings of the sink come to
    `settings`."""
    made: Any = WorkerExtension()
    made.settings = []

    def open_sink(settings: dict[str, Any]) -> Any:
        made.settings.append(settings)
        return len, lambda: {"full": 7}

    made.osd_open_sink = open_sink
    made.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method, draft_model_config=SimpleNamespace(dtype=torch.float32)
        )
    )
    target = torch.nn.LayerNorm(2)
    made.model_runner = SimpleNamespace(
        get_model=lambda: target,
        rejection_sampler=torch.nn.Identity(),
        execute_model=lambda scheduled: scheduled,
    )
    made.get_draft_model = lambda: draft
    return made


def test_a_worker_starts_with_the_name_of_the_release_it_serves(tmp_path: Path) -> None:
    draft = torch.nn.LayerNorm(4)
    tensors = {name: tensor.detach() for name, tensor in draft.named_parameters()}
    release = replace(written(tmp_path, tensors, version=5), draft="code")
    made = starting(draft)
    settings = trace_settings(
        release, CaptureConfig(top_k=3), k=4, sink={"url": "redis"}, target_id="t", seed=1
    )
    assert made.osd_start(settings) == "{}"
    assert made.osd_swapper.version == made.osd_capture.draft_version == 5
    assert made.osd_swapper.proof.why_not == "" and made.osd_swapper.prove() == ""
    assert made.settings == [{"url": "redis"}] and made.osd_sink_stats() == {"full": 7}
    assert made.osd_hook.is_listening and made.osd_lazy_draft is None
    with torch.no_grad():
        draft.weight[0] += 1
    assert made.osd_swapper.prove() != "", "it is this draft that is read back"
    with torch.no_grad():
        draft.weight[0] -= 1
        made.model_runner.get_model().bias[1] += 1
    assert "the target's weights" in made.osd_swapper.prove()


def test_a_worker_whose_draft_is_no_model_of_its_own_does_not_start(tmp_path: Path) -> None:
    """vLLM takes a draft for an EAGLE head by the name of its directory."""
    with pytest.raises(SwapError, match="draft by the method 'eagle3'"):
        starting(torch.nn.Identity(), "eagle3").osd_start(
            trace_settings(written(tmp_path, {}), CaptureConfig(), k=4, sink={}, target_id="t")
        )


def test_traces_need_somewhere_to_go() -> None:
    with pytest.raises(TypeError, match="serve with a worker extension that says where traces go"):
        WorkerExtension().osd_open_sink({})


def test_a_target_of_which_one_weight_moved_has_another_checksum() -> None:
    target = torch.nn.BatchNorm1d(3)
    made = worker(Swapper())
    made.model_runner = SimpleNamespace(get_model=lambda: target)
    before = made.osd_target_checksum()
    for tensor in (target.weight, target.running_mean):
        assert tensor is not None
        tensor.data[1] += 0.5
        assert made.osd_target_checksum() != before
        tensor.data[1] -= 0.5
        assert made.osd_target_checksum() == before
