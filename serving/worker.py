"""The vLLM worker extension: capture and swap, called by the replica through `collective_rpc`.

vLLM mixes this class into its own worker, so all its names start with `osd_`. Arguments and results
are JSON text: weights and logits never travel through these calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from osd.config.schema import CaptureConfig
from osd.errors import SwapError
from osd.records import CommitReport, DraftRelease, Trace, WorkerReport, decode, encode
from serving.capture.capture import Capture
from serving.speculation.lazy_draft import LazyDraft, lazy_draft
from serving.speculation.step_split import StepSplit
from serving.swap import weights
from serving.swap.live_draft import Weights
from serving.swap.proof import SwapProof
from serving.swap.swap import DraftSwapper
from serving.vllm import fixes, hooks

fixes.fix_cpu_sampling()


class WorkerExtension:
    """Subclasses define where traces go (`osd_open_sink`)."""

    osd_capture: Capture
    osd_swapper: DraftSwapper[Weights]
    osd_hook: hooks.VerificationHook
    osd_split: StepSplit
    osd_lazy_draft: LazyDraft | None
    osd_sink_stats: Callable[[], dict[str, int]]

    def osd_open_sink(
        self, settings: dict[str, Any]
    ) -> tuple[Callable[[Sequence[Trace]], int], Callable[[], dict[str, int]]]:
        """A function that stores traces, and one that counts dropped traces by reason."""
        raise TypeError("serve with a worker extension that says where traces go")

    def osd_start(self, settings: str) -> str:
        """Install the hooks. `settings`: {"capture", "release", "k", "sink", "target_id",
        "seed"}."""
        options = json.loads(settings)
        release = decode(json.dumps(options["release"]), DraftRelease)
        put, self.osd_sink_stats = self.osd_open_sink(options["sink"])
        weights.check_method(self)
        self.osd_swapper = DraftSwapper(
            release,
            weights.live_draft(self),
            lambda first: SwapProof(
                lambda: weights.read_back(self),
                weights.draft_dtype(self),
                first,
                lambda: weights.sample_of_target(self),
            ),
        )
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
        self.osd_hook = hooks.VerificationHook(runner, self.osd_capture)
        self.osd_split = StepSplit()
        self.osd_lazy_draft = None
        if options.get("is_controlled"):
            self.osd_lazy_draft = lazy_draft(runner)
        return "{}"

    def osd_stage(self, release: str) -> str:
        """Begin to read and validate a release beside the engine."""
        self.osd_swapper.stage(decode(release, DraftRelease))
        return "{}"

    def osd_staging(self) -> str:
        """How the newest staging goes: a `StagingReport`."""
        return encode(self.osd_swapper.staging).decode()

    def osd_commit(self, version: int) -> str:
        """Make the staged release live: a `CommitReport`."""
        previous = self.osd_swapper.version
        try:
            seconds = self.osd_swapper.commit(version)
        except SwapError as error:
            return encode(CommitReport(previous=previous, error=str(error))).decode()
        self.osd_capture.draft_version = version
        proof = self.osd_swapper.proof
        is_proved = proof is not None and not proof.why_not
        report = CommitReport(pause_s=seconds, previous=previous, proved=is_proved)
        return encode(report).decode()

    def osd_report(self, replica: str, draft: str) -> str:
        """The counters, as a `WorkerReport`."""
        assembler, proof = self.osd_capture.assembler, self.osd_swapper.proof
        report = WorkerReport(
            windows=self.osd_capture.windows.take(replica, draft),
            rows=dict(assembler.rows),
            skipped=dict(assembler.skipped),
            num_traces=assembler.num_traces,
            dropped=self.osd_sink_stats(),
            num_running=assembler.num_running,
            split=self.osd_split.report(),
            unproved=proof.why_not if proof is not None else "",
        )
        return encode(report).decode()

    def osd_drain(self) -> str:
        """Wait until all captured steps have become traces."""
        self.osd_capture.drain()
        return "{}"

    def osd_target_checksum(self) -> float:
        """A number that changes when any weight of the target does."""
        return weights.target_checksum(self)


def trace_settings(release: DraftRelease, capture: CaptureConfig, **more: Any) -> str:
    """The argument of `osd_start`. With `is_controlled`, k may be 0, and the draft sleeps then."""
    return json.dumps(
        {"release": json.loads(encode(release)), "capture": capture.model_dump(), **more}
    )
