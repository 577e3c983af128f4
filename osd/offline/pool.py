"""`osd train --pool N`: drafts that make up for one another, for token trees of several drafts.

    traces ─► draft 1 ─► traces whose answers it does not reproduce ─► draft 2 ─► ...

Boost tuning (SpecInfer, arXiv 2305.09781, section 3): each draft learns from what those before it
do not reproduce, and is judged by such held-out traces alone. All begin with the same draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from osd.common.files import explain
from osd.errors import ConfigError
from osd.models.fit import is_head
from osd.offline import recorded
from osd.offline.recorded import Recorded, Say
from osd.offline.train import Job, check_out, train
from osd.records import Trace

REPRODUCED = 0.9
"""Share of an answer's tokens that a draft proposes right, from which on it reproduces it."""


def run(job: Job, num_drafts: int, traces: Sequence[Path], say: Say, warn: Say) -> int:
    """Train `num_drafts` drafts into `--out`/1, `--out`/2, ...; fewer where another would learn
    nothing new. Returns the exit status: 1 when one, the last, is not better than the draft they
    began with."""
    check_out(job.out)
    if is_head(job.draft):
        raise ConfigError(
            f"--pool {num_drafts}: serving.draft={job.draft} is a head, and a pool is of draft "
            "models; give a draft model, or leave --pool out"
        )
    given = recorded.load(traces, warn)
    with _made(job.out):
        return _train_in_turn(job, num_drafts, given, say)


def _train_in_turn(job: Job, num_drafts: int, given: Recorded, say: Say) -> int:
    left, held = given, list[np.ndarray]()
    for number in range(1, num_drafts + 1):
        one = replace(job, out=job.out / str(number))
        if train(one, left, say):
            return 1
        held = _union(held, _matches(one, given.holdout))
        say(f"drafts 1 to {number} together propose {_share(held):.3f} of the held-out tokens")
        before, left = left, _without_reproduced(one, left)
        num_reproduced = len(before.training) - len(left.training)
        say(f"draft {number} reproduces {num_reproduced} answers it learnt from")
        if number < num_drafts and (reason := _end(left, num_reproduced, job)):
            say(f"the pool ends with {number} of {num_drafts} drafts: {reason}")
            break
    return 0


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """A new directory, which is gone again where nothing came into it."""
    try:
        out.mkdir()
    except OSError as error:
        raise ConfigError(f"--out: {explain(error, out)}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # something is in it
            out.rmdir()


def _end(left: Recorded, num_reproduced: int, job: Job) -> str:
    """Why there is no further draft; "" where there is one."""
    if not left.training:
        return "nothing is left to learn"
    if not num_reproduced:
        return "another would learn from the same answers"
    if (num := len(left.holdout)) < job.config.gate.min_holdout_traces and not job.force:
        return f"{num} held-out traces are left to judge by, see gate.min_holdout_traces"
    return ""


def _without_reproduced(job: Job, traces: Recorded) -> Recorded:
    """The traces whose answers the draft does not reproduce."""

    def missed(some: Sequence[Trace]) -> list[Trace]:
        return [
            trace
            for trace, is_match_T in zip(some, _matches(job, some), strict=True)
            if len(is_match_T) and is_match_T.mean() < REPRODUCED
        ]

    return Recorded(traces.target_id, missed(traces.training), missed(traces.holdout))


def _matches(job: Job, traces: Sequence[Trace]) -> list[np.ndarray]:
    """bool [T − 1] for each trace: the tokens of its answer, from the second on, that the draft
    just made proposes; empty where there is none."""
    from trainer.draft import load_draft
    from trainer.evaluate import can_replay, is_match

    model, max_length = load_draft(job.out), job.config.trainer.max_length
    return [
        is_match(model, trace, max_length)[0] if can_replay(trace) else np.zeros(0, bool)
        for trace in traces
    ]


def _union(held: list[np.ndarray], more: list[np.ndarray]) -> list[np.ndarray]:
    return [a | b for a, b in zip(held, more, strict=True)] if held else more


def _share(held: Sequence[np.ndarray]) -> float:
    num = sum(map(len, held))
    return sum(int(is_held_T.sum()) for is_held_T in held) / num if num else 0.0
