"""What the worker answers about swaps, and which version captured rows bear after one."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osd.config.schema import CaptureConfig
from osd.errors import OSDError, SwapError
from osd.records import DraftRelease, RankReport, StagingReport, WorkerReport, decode, encode
from serving import worker as of_worker
from serving.speculation.sleep.awake_note import AwakeNote
from serving.speculation.sleep.lazy import LazyDraft
from serving.swap.proof import problem
from serving.swap.unswappable import Unswappable
from serving.vllm import parts
from serving.worker import WorkerExtension, start_settings
from tests.support.draft_releases import written


@pytest.fixture(autouse=True)
def whole_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that has every name."""
    monkeypatch.setattr(parts, "problem_with", lambda part: "")
    monkeypatch.setattr(of_worker, "_OFF_AT_IMPORT", {})


class Swapper:
    """Serves version 3, and version 4 once that is confirmed; what is asked of it is noted."""

    def __init__(self) -> None:
        self.version, self.is_whole = 3, True
        self.asked: list[Any] = []
        self.staging = StagingReport(version=4, done=True, seconds=0.5)

    def stage(self, release: DraftRelease) -> None:
        self.asked.append(release)

    def put(self, version: int, is_read: bool) -> RankReport:
        self.asked.append((version, is_read))
        self.is_whole = False
        return RankReport(version=3, seconds=0.25, held={"rank 0": 2**64 - 1}, expected=7)

    def put_back(self, is_read: bool) -> RankReport:
        self.asked.append(is_read)
        return RankReport(version=3)

    def confirm(self) -> RankReport:
        self.version, self.is_whole = 4, True
        return RankReport(version=4)

    def disown(self) -> RankReport:
        self.is_whole = False
        return RankReport(version=4)


def worker(swapper: Any, rank: int = 0) -> Any:
    made: Any = WorkerExtension()
    made.osd_off, made.osd_awake, made.osd_hook, made.osd_lazy_draft = {}, "", None, None
    made.osd_swapper, made.rank = swapper, rank
    if rank == 0:
        made.osd_capture = SimpleNamespace(draft_version=3)
    return made


def test_what_a_rank_holds_is_answered_whole() -> None:
    made = worker(Swapper())
    assert json.loads(made.osd_put(4, True)) == {
        "version": 3,
        "seconds": 0.25,
        "held": {"rank 0": 2**64 - 1},
        "expected": 7,
        "error": "",
        "refused": "",
    }
    assert decode(made.osd_put_back(False), RankReport) == RankReport(version=3)
    assert made.osd_swapper.asked == [(4, True), False]


def test_rows_bear_no_version_until_all_ranks_serve_one() -> None:
    made = worker(Swapper())
    acts = (("osd_put", 0), ("osd_put_back", 0), ("osd_confirm", 4), ("osd_disown", 0))
    for act, version in acts:
        getattr(made, act)(*{"osd_put": (4, True), "osd_put_back": (True,)}.get(act, ()))
        assert made.osd_capture.draft_version == version


def test_other_ranks_swap_and_count_nothing() -> None:
    made = worker(Swapper(), rank=1)
    made.osd_put(4, True)
    made.osd_confirm()
    assert made.osd_swapper.version == 4
    assert decode(made.osd_report("replica-0", "default"), WorkerReport) == WorkerReport()
    assert made.osd_drain() == "{}"


def test_what_fails_on_one_rank_is_answered_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM would leave the answers of the other ranks unread, and take them for those of the next
    call."""
    made = worker(object(), rank=1)
    for act, arguments in {
        "osd_stage": ("{",),
        "osd_staging": (),
        "osd_put": (4, True),
        "osd_put_back": (True,),
        "osd_confirm": (),
    }.items():
        answer = json.loads(getattr(made, act)(*arguments))
        assert list(answer) == ["error"] and "Error: " in answer["error"]
    first = worker(object())
    for act, arguments in {"osd_report": ("a", "b"), "osd_drain": ()}.items():
        assert "AttributeError" in json.loads(getattr(first, act)(*arguments))["error"]
    assert [record.message for record in caplog.records][-1] == (
        "osd_drain failed; serving is not affected"
    )


def test_a_release_is_staged_whole_and_its_staging_told() -> None:
    made = worker(Swapper())
    release = DraftRelease(
        version=4, parent=3, path="/d", sha256="a", target_id="t", created_at=1.0
    )
    assert made.osd_stage(encode(release).decode()) == "{}" and made.osd_swapper.asked == [release]
    assert json.loads(made.osd_staging()) == {
        "version": 4,
        "done": True,
        "error": "",
        "seconds": 0.5,
    }


def test_a_report_says_what_was_counted() -> None:
    made = worker(Swapper())
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
        "off": {},
        "awake": "",
        "error": "",
    }
    assert asked == [("replica-0", "default")]


def starting(draft: torch.nn.Module, method: str = "draft_model", rank: int = 0) -> Any:
    """A worker of vLLM with this draft, before it was hooked. Settings of the sink come to
    `settings`."""
    made: Any = WorkerExtension()
    made.settings, made.rank = [], rank

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
        _sample=lambda logits, metadata: logits,
        execute_model=lambda scheduled: scheduled,
    )
    made.get_draft_model = lambda: draft
    return made


def test_a_worker_starts_with_the_name_of_the_release_it_serves(tmp_path: Path) -> None:
    draft = torch.nn.LayerNorm(4)
    tensors = {name: tensor.detach() for name, tensor in draft.named_parameters()}
    release = replace(written(tmp_path, tensors, version=5), draft="code")
    made = starting(draft)
    settings = start_settings(
        release, CaptureConfig(top_k=3), k=4, sink={"url": "redis"}, target_id="t", seed=1
    )
    first = decode(made.osd_start(settings), RankReport)
    assert problem([first.held], first.expected) == first.error == ""
    assert made.osd_swapper.version == made.osd_capture.draft_version == 5
    assert made.osd_swapper.prove() == ""
    assert made.settings == [{"url": "redis"}] and made.osd_sink_stats() == {"full": 7}
    assert made.osd_hook.is_listening and made.osd_lazy_draft is None
    with torch.no_grad():
        draft.weight[0] += 1
    assert made.osd_swapper.prove() != "", "it is this draft that is read back"
    with torch.no_grad():
        draft.weight[0] -= 1
        made.model_runner.get_model().bias[1] += 1
    assert "the target's weights" in made.osd_swapper.prove()


@pytest.mark.parametrize("gone", ["swap", "capture", "split"])
def test_a_worker_starts_without_a_part_whose_name_is_gone(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "problem_with", lambda part: "it is gone" if part == gone else "")
    draft = torch.nn.LayerNorm(4)
    release = written(tmp_path, {n: t.detach() for n, t in draft.named_parameters()}, version=5)
    made = starting(draft)
    settings = start_settings(release, CaptureConfig(), k=4, sink={}, target_id="t")
    first = decode(made.osd_start(settings), RankReport)
    assert (first.error == "") is (gone != "swap")
    off = json.loads(made.osd_parts_off())
    assert off == {gone: parts.reason(gone, "it is gone")}  # type: ignore[arg-type]
    assert made.osd_swapper.version == 5
    assert isinstance(made.osd_swapper, Unswappable) is (gone == "swap")
    assert (made.osd_hook is None) is (gone == "capture")
    report = json.loads(made.osd_report("replica-0", "default"))
    assert report["off"] == off
    assert report["skipped"] == ({"hook_error": 1} if gone == "capture" else {})


def test_a_part_that_ends_while_it_runs_is_off_from_then_on(tmp_path: Path) -> None:
    draft = torch.nn.LayerNorm(4)
    release = written(tmp_path, {n: t.detach() for n, t in draft.named_parameters()}, version=5)
    made = starting(draft)
    made.osd_start(start_settings(release, CaptureConfig(), k=4, sink={}, target_id="t"))
    made.model_runner.execute_model(SimpleNamespace())
    assert "scheduled_new_reqs" in made.osd_hook.problem and not made.osd_hook.is_listening
    made.osd_lazy_draft = SimpleNamespace(problem="KeyError: 3")
    made.osd_certain = SimpleNamespace(problem="KeyError: 4")
    assert json.loads(made.osd_parts_off()) == {
        "capture": parts.reason("capture", made.osd_hook.problem),
        "sleep": parts.reason("sleep", "KeyError: 3"),
        "sampled": "KeyError: 4; drawn tokens are accepted less often",
    }


def test_what_cannot_be_swapped_refuses_every_release_with_the_reason() -> None:
    made = worker(Unswappable(3, "it is gone"))
    release = DraftRelease(
        version=4, parent=3, path="/d", sha256="a", target_id="t", created_at=1.0
    )
    made.osd_stage(encode(release).decode())
    staging = json.loads(made.osd_staging())
    assert (staging["done"], staging["version"]) == (True, 4)
    assert staging["error"] == "swap is off: it is gone"
    put = decode(made.osd_put(4, True), RankReport)
    assert (put.error, put.version, put.held) == ("swap is off: it is gone", 3, {})
    assert decode(made.osd_put_back(True), RankReport).error == ""
    assert made.osd_capture.draft_version == 3


def test_only_the_first_rank_opens_a_sink_and_hooks_the_engine(tmp_path: Path) -> None:
    draft = torch.nn.LayerNorm(4)
    tensors = {name: tensor.detach() for name, tensor in draft.named_parameters()}
    made = starting(draft, rank=1)
    settings = start_settings(
        written(tmp_path, tensors), CaptureConfig(), k=4, sink={}, target_id="t"
    )
    execute = made.model_runner.execute_model
    assert decode(made.osd_start(settings), RankReport).held
    assert made.settings == [] and made.osd_hook is None
    assert made.model_runner.execute_model is execute


def test_a_worker_whose_draft_is_no_model_of_its_own_does_not_start(tmp_path: Path) -> None:
    """vLLM takes a draft for an EAGLE head by the name of its directory."""
    answer = starting(torch.nn.Identity(), "eagle3").osd_start(
        start_settings(written(tmp_path, {}), CaptureConfig(), k=4, sink={}, target_id="t")
    )
    assert "drafts by the method 'eagle3'" in decode(answer, RankReport).refused


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


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_draft_sleeps_where_the_names_of_its_own_runner_are_there(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = ("sleep_v2", "sleep") if runner == "V2" else ("sleep", "sleep_v2")
    monkeypatch.setattr(of_worker.hooks, "is_v2", lambda model_runner: runner == "V2")
    monkeypatch.setattr(of_worker, "why_awake", lambda model_runner: "")
    lazy = LazyDraft(1)
    monkeypatch.setattr(of_worker, "lazy_draft", lambda model_runner: lazy)
    for gone, sleeper in ((other, lazy), (own, None)):
        monkeypatch.setattr(parts, "problem_with", lambda part, gone=gone: "gone" * (part == gone))
        made = worker(Swapper())
        made.model_runner = None
        made.osd_lazy_draft = None
        made.osd_let_sleep(AwakeNote(None))
        assert made.osd_lazy_draft is sleeper
        assert ("sleep" in made.osd_off) == (sleeper is None)
    monkeypatch.setattr(of_worker, "why_awake", lambda model_runner: "it uses M-RoPE")
    made.osd_off = {}
    monkeypatch.setattr(parts, "problem_with", lambda part: "")
    made.osd_let_sleep(AwakeNote(None))
    assert (made.osd_lazy_draft, made.osd_awake, made.osd_off) == (None, "it uses M-RoPE", {})


def test_an_error_that_ended_an_engine_of_several_ranks_leaves_the_next_draft_awake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank's, though only one failed."""
    monkeypatch.setattr(of_worker.hooks, "is_v2", lambda model_runner: False)
    monkeypatch.setattr(of_worker, "why_awake", lambda model_runner: "")
    monkeypatch.setattr(of_worker, "lazy_draft", lambda model_runner: LazyDraft(2))
    note = AwakeNote(tmp_path / "replica-0.awake")
    first, after = worker(Swapper(), rank=1), [worker(Swapper(), rank) for rank in range(2)]
    for made in (first, *after):
        made.model_runner = None
    first.osd_let_sleep(note)
    assert first.osd_lazy_draft is not None and first.osd_off == {}
    first.osd_lazy_draft.end_process = lambda: None
    with pytest.raises(KeyError):
        first.osd_lazy_draft._guarded(lambda: {}["block"])
    for made in after:
        made.osd_let_sleep(note)
        assert made.osd_lazy_draft is None
        assert "KeyError: 'block'" in made.osd_off["sleep"]
        assert made.osd_off["sleep"].endswith("the draft runs at k = 0 too")


def test_a_note_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert AwakeNote(tmp_path / "gone").read() == AwakeNote(tmp_path).read() == ""


def test_a_note_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    AwakeNote(tmp_path / "file" / "note").write("KeyError: 3")
    assert "will let its draft sleep again" in caplog.text


def test_a_note_is_kept_for_a_day_where_there_was_no_directory_for_it(tmp_path: Path) -> None:
    note = AwakeNote(tmp_path / "data" / "gpu-2-8000.awake")
    note.write("KeyError: 3")
    assert "KeyError: 3" in note.read()
    for age, is_kept in ((23 * 3600, True), (25 * 3600, False)):
        written_at = time.time() - age
        os.utime(tmp_path / "data" / "gpu-2-8000.awake", (written_at, written_at))
        assert bool(note.read()) is is_kept


def test_a_draft_that_must_stay_awake_is_left_to_vllm() -> None:
    made = worker(Swapper(), rank=1)
    made.osd_stay_awake()  # nothing sleeps here
    made.osd_lazy_draft = LazyDraft(2)
    made.osd_stay_awake()
    assert made.osd_lazy_draft.is_left and made.osd_lazy_draft.is_off


class Installed:
    """Notes what is installed in a worker, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, certain: Any) -> None:
        self.did: list[str] = []
        noted = self.did.append

        def verify(worker: Any, off: dict[str, str]) -> Any:
            noted("certain")
            return certain

        monkeypatch.setattr(of_worker, "verify_certain", verify)
        monkeypatch.setattr(of_worker, "ask_in_worker", lambda *given: noted("ask") or "asks")


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("certain", [None, SimpleNamespace(problem="")])
def test_beside_drawn_drafts_the_memory_is_asked_once_its_tokens_are_told_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, certain: Any
) -> None:
    installed = Installed(monkeypatch, certain)
    draft = torch.nn.LayerNorm(4)
    release = written(tmp_path, {n: t.detach() for n, t in draft.named_parameters()})
    made = starting(draft, rank=1)
    made.vllm_config.speculative_config.draft_sample_method = method
    options: dict[str, Any] = {"k": 4, "sink": {}, "target_id": "t", "is_controlled": True}
    made.osd_start(start_settings(release, CaptureConfig(), **options))
    asks = method == "greedy" or certain is not None
    assert installed.did == ["certain", *["ask"] * asks]
    assert made.osd_ask == ("asks" if asks else None)
    del made.osd_started  # what followed was refused
    made.osd_start(start_settings(release, CaptureConfig(), **options))
    assert installed.did.count("certain") == (2 if certain is None else 1), "wrapped once"


def test_a_worker_finds_the_note_where_it_is_told_to_look(tmp_path: Path) -> None:
    draft, note = torch.nn.LayerNorm(4), tmp_path / "replica-0.awake"
    note.write_text("KeyError: 3")
    release = written(tmp_path, {n: t.detach() for n, t in draft.named_parameters()})
    made = starting(draft, rank=1)
    options: dict[str, Any] = {"k": 4, "sink": {}, "target_id": "t", "is_controlled": True}
    made.osd_start(start_settings(release, CaptureConfig(), awake_note=str(note), **options))
    assert "KeyError: 3" in made.osd_off["sleep"] and made.osd_lazy_draft is None


class Listening:
    """A hook and its capture, as far as they are switched."""

    def __init__(self) -> None:
        self.is_listening, self.problem = True, ""
        self.did: list[Any] = []

    def set_enabled(self, is_enabled: bool, request_fraction: float | None) -> None:
        self.did.append(is_enabled)

    def let_go(self) -> None:
        self.did.append("let go")

    def listen(self, wanted: bool) -> None:
        self.is_listening = wanted


def test_the_first_rank_is_switched_and_requests_are_let_go_once() -> None:
    made = worker(Swapper())
    made.osd_hook = made.osd_capture = heard = Listening()
    for observed, captured in ((True, False), (False, False), (False, False), (True, True)):
        assert made.osd_switch(observed, captured) == "{}"
        assert heard.is_listening is observed
    assert heard.did == [False, False, "let go", False, True]


def test_other_ranks_and_engines_without_a_hook_have_nothing_to_switch() -> None:
    other = worker(Swapper(), rank=1)
    other.osd_hook = other.osd_capture = heard = Listening()
    without = worker(Swapper())
    for made in (other, without):
        assert made.osd_switch(False, False) == "{}"
    assert heard.did == []


def refusing(error: Exception | None) -> Any:
    made = worker(Swapper())

    def install(options: dict[str, Any]) -> str:
        made.num_installed = getattr(made, "num_installed", 0) + 1
        if error is not None and made.num_installed == 1:
            raise error
        return encode(RankReport(version=7)).decode()

    made.osd_install = install
    return made


@pytest.mark.parametrize(
    ("error", "says"),
    [(SwapError("a head is not served"), "a head is not served"), (KeyError(3), "KeyError: 3")],
)
def test_hooks_that_are_refused_are_an_answer_and_may_be_asked_for_again(
    error: Exception, says: str
) -> None:
    """vLLM would leave the answers of the other ranks unread."""
    made = refusing(error)
    assert decode(made.osd_start("{}"), RankReport) == RankReport(refused=says)
    assert decode(made.osd_start("{}"), RankReport) == RankReport(version=7)
    assert decode(made.osd_start("{}"), RankReport) == RankReport(version=7)
    assert made.num_installed == 2, "once they are there, they are not installed again"


def test_the_sampler_is_wrapped_once_however_often_the_rest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attached engine tries again for as long as it serves, and each wrap is a call more in
    every step."""
    draft = torch.nn.LayerNorm(4)
    release = written(tmp_path, {n: t.detach() for n, t in draft.named_parameters()})
    made, wrapped = starting(draft), []
    problems = iter(["requests are running already", ""])
    monkeypatch.setattr(
        of_worker, "sample_undrafted", lambda runner: wrapped.append(runner) or next(problems)
    )

    def refusing_sink(settings: dict[str, Any]) -> Any:
        raise OSDError("there is no such buffer")

    open_sink, made.osd_open_sink = made.osd_open_sink, refusing_sink
    settings = start_settings(release, CaptureConfig(), k=4, sink={}, target_id="t")
    for _ in range(4):
        assert decode(made.osd_start(settings), RankReport).refused == "there is no such buffer"
    made.osd_open_sink = open_sink
    assert decode(made.osd_start(settings), RankReport).refused == made.osd_undrafted() == ""
    assert wrapped == [made.model_runner] * 2, "until it goes well"
