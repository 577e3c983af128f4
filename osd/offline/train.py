"""`osd train`: distils recorded traces with the service's trainer, without vLLM, Ray or Redis.

files of traces ─► memory buffer ─► rounds ─► candidate ─► gate on held-out traces ─► --out
                                                             └► not better: kept aside, status 1
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from osd.common.files import explain
from osd.common.progress import Advance, progress
from osd.config.schema import Config, GateConfig
from osd.control import policy
from osd.errors import ConfigError, OSDError
from osd.models import resolve
from osd.models.checkpoint_files import weight_files
from osd.models.compatibility import read_config, vocab_size
from osd.models.fit import is_head
from osd.models.head_fit import check_parts
from osd.models.teacher import check_teacher, dtype_of
from osd.models.vocab_padding import write_fitting
from osd.offline import recorded
from osd.offline.recorded import Recorded, Say
from osd.offline.report import describe, judgement, write_report
from osd.records import HOLDOUT_ONE_IN, DraftRelease, RoundOutcome
from osd.releases.store import ReleaseStore
from trainer import trackers

if TYPE_CHECKING:
    from trainer.sampling.teacher import Teacher

MAX_ROUNDS = 50
"""Each round ends with writing and evaluating a candidate, so more traces make rounds longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to make of recorded traces."""

    config: Config
    draft: Path
    """The draft to begin with."""
    out: Path
    epochs: int
    """Passes over the training traces."""
    force: bool
    """Take the new draft even when it was not shown to be better."""


def check_out(out: Path) -> None:
    """Raise `ConfigError` unless `out` can be made."""
    if out.exists():
        raise ConfigError(f"--out: {out}: exists already; name a new directory")
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out: {out}: there is no directory {out.absolute().parent}; make it first"
        )


def check_draft(config: Config) -> Path:
    """The directory of the draft to begin with. Raises `ConfigError` when it cannot be trained,
    when a tracker is not installed, or when the trainer needs the target and cannot have it."""
    trackers.check_installed(config.trainer.trackers)
    draft = resolve.resolve(config.serving.draft, "serving.draft")
    target = check_target(config, draft)
    if not is_head(draft):
        weight_files(draft)
    elif target is not None:
        check_parts(target, draft)
    return draft


def check_target(config: Config, draft: Path) -> Path | None:
    """The directory of the target where `trainer.sampling` or a head needs it. Raises
    `ConfigError`."""
    sampling = config.trainer.sampling
    if sampling == "teacher" and not is_head(draft):
        return None
    if not config.serving.target:
        raise ConfigError(
            f"serving.draft={draft}: is a head, which learns from the hidden states of the target "
            "that the traces were recorded from; set serving.target"
            if is_head(draft)
            else f"trainer.sampling={sampling}: needs the target that the traces were recorded "
            "from; set serving.target, or use trainer.sampling=teacher"
        )
    target = resolve.resolve(config.serving.target, "serving.target")
    check_teacher(config, target, head=draft if is_head(draft) else None, is_offline=True)
    return target


def run(job: Job, traces: Sequence[Path], say: Say, warn: Say) -> int:
    """Train on files of traces. Returns the exit status; `warn` is told of unreadable traces."""
    check_out(job.out)
    return train(job, recorded.load(traces, warn), say)


def train(job: Job, traces: Recorded, say: Say) -> int:
    """Train, evaluate and write the draft. Returns the exit status: 1 when the draft is not better,
    and kept aside. Where it is stopped (`KeyboardInterrupt`), the rounds before make the draft."""
    _check_vocabulary(job.draft, traces)
    check_holdout(len(traces.holdout), "--traces: only", job.config.gate, job.force)
    say(describe(traces))
    with workplace(job.out) as work:
        release = _release_of(job.draft, traces.target_id, work)
        try:
            outcome, is_stopped = _run_rounds(job, traces, release, work, say)
        except OSDError as error:  # what is wrong with the copy is wrong with the draft
            raise type(error)(str(error).replace(release.path, str(job.draft))) from None
        verdict = policy.should_publish(outcome, release, job.config.gate, pinned=False)
        is_taken = verdict.ok or job.force
        out = job.out if is_taken else free_name(job.out, "refused")
        write_report(outcome, verdict, traces, draft=str(job.draft), epochs=job.epochs)
        Path(outcome.path).rename(out)
    say(judgement(outcome, job.config.gate))
    if is_taken:
        say(
            f"draft: {out}"
            + ("" if verdict.ok else "  (taken by --force although not shown to be better)")
        )
    else:
        say(f"refused: {verdict.reason}; the draft is kept aside in {out}")
    if is_stopped:
        raise KeyboardInterrupt
    return int(not is_taken)


def _run_rounds(
    job: Job, traces: Recorded, release: DraftRelease, work: Path, say: Say
) -> tuple[RoundOutcome, bool]:
    """Train on the shuffled traces in rounds. Returns the last candidate with the figures of the
    rounds that led to it, or an earlier one that was clearly better; and whether it was stopped."""
    from trainer.loop import Trainer

    total = job.epochs * len(traces.training)
    size = max(job.config.trainer.max_new_traces, math.ceil(total / MAX_ROUNDS))
    curves = job.config.trainer.tracker_dir or str(free_name(job.out, "curves"))
    config = job.config.trainer.model_copy(
        # No average of the rounds: nothing is served between them that could be harmed.
        update={"max_new_traces": size, "tracker_dir": curves, "averaging_rate": 1.0}
    )
    buffer, given = traces.buffer(), job.config.speculation
    of_all = job.config.gate.model_copy(update={"judge_since_change": False})
    trainer = Trainer(
        *(config, of_all, given.k_max, buffer, work, traces.target_id),
        teacher=_teacher(job, traces),
        is_sampled=given.is_sampled,
    )
    kept: list[RoundOutcome] = []
    undone: list[RoundOutcome] = []
    best: RoundOutcome | None = None
    goes_back = is_stopped = False
    try:
        with progress("training", total, "traces") as advance:
            for part in _parts(len(traces.training), job.epochs, size, config.seed):
                buffer.put([traces.training[i] for i in part])
                outcome = trainer.run_round(release, _share_of(len(part), advance))
                if goes_back and not outcome.discarded:
                    kept.clear()
                (undone if outcome.discarded else kept).append(outcome)
                if not outcome.discarded and _alpha(outcome) > (_alpha(best) if best else 0.0):
                    kept[-1] = _set_aside(outcome, work)
                    best = _sum(kept)
                goes_back = _goes_back(outcome) or (goes_back and bool(outcome.discarded))
                advance(0, _figures(outcome))
    except KeyboardInterrupt:
        if not kept:
            raise
        is_stopped = True
        say(f"stopped after {len(kept) + len(undone)} rounds of training")
    trainer.close()
    if not kept:
        raise OSDError(
            f"no round of training helped: {outcome.discarded}; try a lower trainer.learning_rate"
        )
    if undone:
        say(
            f"{len(undone)} of {len(undone) + len(kept)} rounds undone, the last because: "
            f"{undone[-1].discarded}"
        )
    last = _sum(kept)
    if best is not None and _is_clearly_worse(last, best):
        say(
            f"the last round's α is {_alpha(last):.3f}, an earlier one's {_alpha(best):.3f}: that "
            "one is taken; fewer --epochs or a lower trainer.learning_rate would do"
        )
        return best, is_stopped
    return last, is_stopped


def _alpha(outcome: RoundOutcome) -> float:
    return outcome.eval.alpha_candidate if outcome.eval else 0.0


def _set_aside(outcome: RoundOutcome, work: Path) -> RoundOutcome:
    """The candidate where later rounds leave it alone, in the place of an earlier one."""
    aside = work / "best"
    shutil.rmtree(aside, ignore_errors=True)
    Path(outcome.path).rename(aside)
    return replace(outcome, path=str(aside))


def _is_clearly_worse(last: RoundOutcome, best: RoundOutcome) -> bool:
    """Whether their gains' intervals leave no doubt. The best of many rounds is often so by chance
    alone."""
    if last.eval is None or best.eval is None:
        return False
    return last.eval.diff_high < best.eval.diff_low


def _share_of(num_traces: int, advance: Advance) -> Callable[[int, int, float], None]:
    """A callback that advances by `num_traces` over the steps of a round."""

    def on_step(done: int, total: int, loss: float) -> None:
        advance(num_traces * done // total - num_traces * (done - 1) // total, f"loss {loss:.3f}")

    return on_step


def _parts(num_traces: int, epochs: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of the traces of each round. Each epoch has its own order, and its rounds have nearly
    the same size."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        yield from np.array_split(rng.permutation(num_traces), math.ceil(num_traces / size))


def _sum(outcomes: list[RoundOutcome]) -> RoundOutcome:
    return replace(
        outcomes[-1],
        num_steps=sum(o.num_steps for o in outcomes),
        num_tokens=sum(o.num_tokens for o in outcomes),
        loss_first=outcomes[0].loss_first,
        seconds=sum(o.seconds for o in outcomes),
        num_student_traces=sum(o.num_student_traces for o in outcomes),
        sampling_cpu_s=sum(o.sampling_cpu_s for o in outcomes),
        scoring_cpu_s=sum(o.scoring_cpu_s for o in outcomes),
    )


def _goes_back(outcome: RoundOutcome) -> bool:
    """Whether the trainer begins anew with the first draft after this round."""
    from trainer.loop import NON_FINITE

    is_worse = outcome.eval is not None and outcome.eval.diff_high < 0
    return is_worse or (outcome.discarded == NON_FINITE and not outcome.num_steps)


def _figures(outcome: RoundOutcome) -> str:
    alpha = f", α {outcome.eval.alpha_candidate:.3f}" if outcome.eval else ""
    undone = ", undone" if outcome.discarded else ""
    return f"{outcome.num_steps} steps, loss {outcome.loss_last:.3f}{alpha}{undone}"


# Before


def _check_vocabulary(draft: Path, traces: Recorded) -> None:
    """Raise `ConfigError` when the traces hold tokens that the draft does not have."""
    size = vocab_size(read_config(draft), draft)
    arrays = ((t.prompt_ids, t.output_ids) for t in [*traces.training, *traces.holdout])
    largest = max((int(ids.max()) for ids in chain.from_iterable(arrays) if ids.size), default=0)
    if largest >= size:
        raise ConfigError(
            f"serving.draft={draft}: has {size} tokens, the traces hold token {largest}; "
            "use a draft with the tokenizer of the target they were recorded from"
        )


def _teacher(job: Job, traces: Recorded) -> Teacher | None:
    """The target that the traces were recorded from, where the trainer needs it. Raises
    `ConfigError`."""
    from trainer.sampling.teacher import Teacher

    config = job.config
    target = check_target(config, job.draft)
    if target is None:
        return None
    if (found := resolve.fingerprint(target)) != traces.target_id:
        way_out = "" if is_head(job.draft) else ", or use trainer.sampling=teacher"
        raise ConfigError(
            f"serving.target={target}: is target {found}, and the traces were recorded from "
            f"{traces.target_id}; give that one{way_out}"
        )
    own = vocab_size(read_config(job.draft), job.draft)
    if own != (num := vocab_size(read_config(target), target)):
        raise ConfigError(
            f"trainer.sampling={config.trainer.sampling}: the draft has {own} tokens, the target "
            f"{num}; use a draft that `osd serve` has published, which is fitted to the target"
        )
    return Teacher(
        target,
        top_k=config.capture.top_k,
        dtype=dtype_of(config),
        memory=config.trainer.target_memory_bytes,
    )


def check_holdout(num: int, what: str, gate: GateConfig, force: bool) -> None:
    """Raise `ConfigError` when too few traces are held out to evaluate the new draft."""
    if num < gate.min_holdout_traces and not force:
        raise ConfigError(
            f"{what} {num} held out (one in {HOLDOUT_ONE_IN}), gate.min_holdout_traces="
            f"{gate.min_holdout_traces} are needed to judge the new draft; give more, or take it "
            "unjudged with --force"
        )


def _release_of(draft: Path, target_id: str, work: Path) -> DraftRelease:
    """The draft as a release, its weights in one file."""
    num_tokens = vocab_size(read_config(draft), draft)
    copy = partial(write_fitting, num_tokens=num_tokens)
    return ReleaseStore(work / "releases").publish(draft, parent=0, target_id=target_id, copy=copy)


@contextmanager
def workplace(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out`, on the same file system."""
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise ConfigError(f"--out: {explain(error, out)}") from None
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# After


def free_name(out: Path, suffix: str) -> Path:
    """The first free name of `OUT.SUFFIX`, `OUT.SUFFIX-2`, and so on."""
    name, number = out.with_name(f"{out.name}.{suffix}"), 1
    while name.exists():
        number += 1
        name = out.with_name(f"{out.name}.{suffix}-{number}")
    return name
