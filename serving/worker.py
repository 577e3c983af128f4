"""The vLLM worker extension: capture and swap, called by the replica through `collective_rpc`.

vLLM mixes this class into its own worker, so all its names start with `osd_`. Arguments and results
are JSON text: weights and logits never travel through these calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from osd.config.schema import CaptureConfig
from osd.errors import OSDError
from osd.records import (
    NO_VERSION,
    DraftRelease,
    RankReport,
    Trace,
    WorkerReport,
    decode,
    encode,
)
from serving.capture.capture import Capture
from serving.speculation.memory.certain import Certain, verify_certain
from serving.speculation.memory.in_worker import AskV1, AskV2, ask_in_worker
from serving.speculation.memory.ranks import RankMemory, ask_ranks, has_ranks_to_ask
from serving.speculation.sleep.awake_note import AwakeNote
from serving.speculation.sleep.runners import LazyDraft, lazy_draft, why_awake
from serving.speculation.step_split import StepSplit
from serving.swap import weights
from serving.swap.live_draft import Weights
from serving.swap.proof import SwapProof
from serving.swap.shape import DraftShape
from serving.swap.swap import DraftSwapper
from serving.swap.unswappable import Unswappable
from serving.vllm import fixes, heads, hooks, parts
from serving.vllm.schedules import draws_drafts
from serving.vllm.undrafted_sampling import sample_undrafted

logger = logging.getLogger(__name__)

_OFF_AT_IMPORT: dict[str, str] = {}


def _repair() -> None:
    if problem := fixes.problem_with_sampling():
        parts.switch_off(_OFF_AT_IMPORT, "repairs", problem)
    else:
        fixes.fix_cpu_sampling()


_repair()


Answer = Callable[..., str]


def answering(method: Answer) -> Answer:
    """A method that answers with its error instead of raising it. vLLM leaves the other ranks'
    answers unread where one raises, and would take them for those of the next call."""

    @wraps(method)
    def answer(*arguments: Any) -> str:
        try:
            return method(*arguments)
        except Exception as error:
            logger.exception("%s failed; serving is not affected", method.__name__)
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    return answer


class WorkerExtension:
    """One rank of an engine. All of them draft, and swap together (`serving/swap/ranks.py`); they
    see the same tokens, so the first alone captures and counts.

    Subclasses define where traces go (`osd_open_sink`).
    """

    rank: int
    osd_capture: Capture
    osd_swapper: DraftSwapper[Weights] | Unswappable
    osd_hook: hooks.VerificationHook | None
    osd_split: StepSplit
    osd_lazy_draft: LazyDraft | None
    osd_ask: AskV1 | AskV2 | RankMemory | None
    osd_certain: Certain | None = None
    osd_off: dict[str, str]
    osd_awake: str
    osd_sink_stats: Callable[[], dict[str, int]]
    osd_undrafted_problem: str

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        """A function that stores traces, and one that counts dropped traces by reason. Called on
        the first rank."""
        raise TypeError("serve with a worker extension that says where traces go")

    def osd_start(self, settings: str) -> str:
        """Install the hooks, once. `settings`: {"capture", "release", "k", "sink", "target_id",
        "seed", "is_controlled", "awake_note", "is_observed", "is_captured"}. Answers with a
        `RankReport` of the draft the engine has loaded, or with why they are not installed."""
        if (started := getattr(self, "osd_started", "")) != "":
            return str(started)
        try:
            self.osd_started = self.osd_install(json.loads(settings))
        except Exception as error:
            if not isinstance(error, OSDError):
                logger.exception("the hooks are not installed")
            why = str(error) if isinstance(error, OSDError) else f"{type(error).__name__}: {error}"
            return encode(RankReport(refused=why)).decode()
        return self.osd_started

    def osd_install(self, options: dict[str, Any]) -> str:
        """Install the hooks."""
        release = decode(json.dumps(options["release"]), DraftRelease)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.osd_off = dict(_OFF_AT_IMPORT)
        self.osd_swapper = parts.start(
            self.osd_off, "swap", lambda: self.osd_make_swapper(release)
        ) or Unswappable(release.version, self.osd_off["swap"])
        first = self.osd_swapper.first_report()
        if getattr(self, "osd_undrafted_problem", "not tried"):
            # It wraps the sampler, and must not wrap it again when what follows is refused.
            self.osd_undrafted_problem = sample_undrafted(runner)
        is_controlled = options.get("is_controlled", False)
        if is_controlled and self.osd_certain is None:
            self.osd_certain = verify_certain(self, self.osd_off)
        self.osd_hook = None
        if self.osd_is_first_rank:
            self.osd_start_capture(release, options)
        self.osd_lazy_draft, self.osd_awake, self.osd_ask = None, "", None
        if is_controlled:
            path = options.get("awake_note")
            self.osd_let_sleep(AwakeNote(Path(path) if path else None))
            self.osd_let_ask()
        return encode(first).decode()

    def osd_make_swapper(self, release: DraftRelease) -> DraftSwapper[Weights]:
        """What swaps the draft, which is the release now."""
        draft = Path(release.path)
        heads.check_draft(self, draft)
        names = DraftShape.of(draft).shapes.keys()
        proof = SwapProof(
            lambda: weights.read_back(self, names),
            weights.draft_dtype(self),
            lambda: weights.sample_of_target(self),
        )
        return DraftSwapper(release, weights.live_draft(self), proof)

    def osd_start_capture(self, release: DraftRelease, options: dict[str, Any]) -> None:
        """Install the hooks that one rank of an engine has."""
        put, self.osd_sink_stats = self.osd_open_sink(options["sink"])
        self.osd_capture = Capture(
            CaptureConfig.model_validate(options["capture"]),
            draft=release.draft,
            target_id=options["target_id"],
            num_speculative_tokens=options["k"],
            put=put,
            draft_version=release.version,
            seed=options.get("seed"),
        )
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.osd_hook = parts.start(
            self.osd_off,
            "capture",
            lambda: hooks.VerificationHook(runner, self.osd_capture),
            "capture_v2" if hooks.is_v2(runner) else "capture",
        )
        if self.osd_hook is None:
            self.osd_capture.assembler.skipped["hook_error"] += 1
        self.osd_switch(options.get("is_observed", True), options.get("is_captured", True))
        self.osd_split = StepSplit()
        parts.start(self.osd_off, "split", self.osd_split.start)

    def osd_let_sleep(self, note: AwakeNote) -> None:
        """Let the draft sleep at k = 0, where it can, and where no engine before this one ended of
        that."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        own: parts.Part = "sleep_v2" if hooks.is_v2(runner) else "sleep"
        if failed := note.read():
            return parts.switch_off(self.osd_off, "sleep", failed, own)

        def let_sleep() -> LazyDraft | None:
            self.osd_awake = why_awake(runner)
            return None if self.osd_awake else lazy_draft(runner)

        self.osd_lazy_draft = parts.start(self.osd_off, "sleep", let_sleep, own)
        if self.osd_lazy_draft is not None:
            self.osd_lazy_draft.before_ending = note.write
        return None

    def osd_let_ask(self) -> None:
        """Let this worker ask the memory within its steps, where the scheduler cannot."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        own: parts.Part = "memory_v2" if hooks.is_v2(runner) else "memory"
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        self.osd_ask, off = None, self.osd_off
        if draws_drafts(config) and self.osd_certain is None:
            return  # what it found would be verified as drawn
        beside = parts.start(off, "memory", lambda: ask_in_worker(config, runner), own)
        if beside is not None:
            self.osd_ask = beside
        elif "memory" not in off and parts.start(off, "memory", lambda: has_ranks_to_ask(self)):
            self.osd_ask = parts.start(off, "memory", lambda: ask_ranks(self), "memory_ranks")

    def osd_begin_to_ask(self) -> None:
        """All ranks are ready to ask a memory of their own."""
        if isinstance(self.osd_ask, RankMemory):
            self.osd_ask.begin()

    @answering
    def osd_memory(self, name: str, argument: str) -> str:
        """`forget`, or `remember` with answers: how many tokens wait to be remembered."""
        num_waiting = 0
        if isinstance(self.osd_ask, RankMemory):
            if name == "forget":
                self.osd_ask.forget()
            else:
                num_waiting = self.osd_ask.remember(json.loads(argument))
        return json.dumps(num_waiting)

    def osd_stay_awake(self) -> None:
        """The draft of some rank cannot sleep, so no rank's does: they run it together."""
        if self.osd_lazy_draft is not None:
            self.osd_lazy_draft.leave()

    @answering
    def osd_switch(
        self, is_observed: bool, is_captured: bool, request_fraction: float | None = None
    ) -> str:
        """What is heard of the engine's steps from now on: nothing, counters, or traces too, of so
        many requests (None = unchanged)."""
        if self.osd_is_first_rank and self.osd_hook is not None:
            self.osd_capture.set_enabled(is_captured, request_fraction)
            if self.osd_hook.is_listening and not is_observed:
                self.osd_capture.let_go()
            self.osd_hook.listen(is_observed)
        return "{}"

    @property
    def osd_is_first_rank(self) -> bool:
        return self.rank == 0

    def osd_parts_off(self) -> str:
        """Part that is off in this worker -> why; {} where all work."""
        off = dict(self.osd_off)
        if self.osd_hook is not None and self.osd_hook.problem:
            off["capture"] = parts.reason("capture", self.osd_hook.problem)
        if self.osd_lazy_draft is not None and self.osd_lazy_draft.problem:
            off["sleep"] = parts.reason("sleep", self.osd_lazy_draft.problem)
        if self.osd_certain is not None and self.osd_certain.problem:
            off["sampled"] = f"{self.osd_certain.problem}; drawn tokens are accepted less often"
        return json.dumps(off)

    @answering
    def osd_stage(self, release: str) -> str:
        """Begin to read and validate a release beside the engine."""
        self.osd_swapper.stage(decode(release, DraftRelease))
        return "{}"

    @answering
    def osd_staging(self) -> str:
        """How the newest staging goes: a `StagingReport`."""
        return encode(self.osd_swapper.staging).decode()

    @answering
    def osd_drop(self) -> str:
        """What is staged is not wanted any more."""
        self.osd_swapper.drop()
        return "{}"

    @answering
    def osd_put(self, version: int, is_read: bool) -> str:
        """Make the staged release live, for no version yet: a `RankReport`."""
        return self.osd_tell_capture(self.osd_swapper.put(version, is_read))

    @answering
    def osd_put_back(self, is_read: bool) -> str:
        """Drop what is staged and take out what was put in: a `RankReport`."""
        return self.osd_tell_capture(self.osd_swapper.put_back(is_read))

    @answering
    def osd_confirm(self) -> str:
        """What is live is whole on all ranks, and counts for its version: a `RankReport`."""
        answer = self.osd_tell_capture(self.osd_swapper.confirm())
        if self.osd_is_first_rank and self.osd_swapper.version == NO_VERSION:
            # A draft that is no release: what it serves counts for none.
            self.osd_capture.windows.last_version = NO_VERSION
        return answer

    @answering
    def osd_disown(self) -> str:
        """What is live counts for no version: a `RankReport`."""
        return self.osd_tell_capture(self.osd_swapper.disown())

    def osd_tell_capture(self, report: RankReport) -> str:
        """The report, after capture was told which version drafts from now on; 0 = none."""
        if self.osd_is_first_rank:
            swapper = self.osd_swapper
            self.osd_capture.draft_version = swapper.version if swapper.is_whole else NO_VERSION
        return encode(report).decode()

    @answering
    def osd_report(self, replica: str, draft: str) -> str:
        """The counters, as a `WorkerReport`; an empty one of all ranks but the first."""
        if not self.osd_is_first_rank:
            return encode(WorkerReport()).decode()
        assembler = self.osd_capture.assembler
        report = WorkerReport(
            windows=self.osd_capture.windows.take(replica, draft),
            rows=dict(assembler.rows),
            skipped=dict(assembler.skipped),
            num_traces=assembler.num_traces,
            dropped=self.osd_sink_stats(),
            num_running=assembler.num_running,
            split=self.osd_split.report(),
            off=json.loads(self.osd_parts_off()),
            awake=self.osd_awake,
        )
        return encode(report).decode()

    def osd_undrafted(self) -> str:
        """Why this rank cannot sample requests that are not drafted for; "" when it can."""
        return self.osd_undrafted_problem

    @answering
    def osd_drain(self) -> str:
        """Wait until all captured steps have become traces."""
        if self.osd_is_first_rank:
            self.osd_capture.drain()
        return "{}"

    def osd_target_checksum(self) -> float:
        """A number that changes when any weight of the target does."""
        return weights.target_checksum(self)


def start_settings(release: DraftRelease, capture: CaptureConfig, **more: Any) -> str:
    """The argument of `osd_start`. With `is_controlled`, k may be 0, and the draft sleeps then."""
    return json.dumps(
        {"release": json.loads(encode(release)), "capture": capture.model_dump(), **more}
    )
