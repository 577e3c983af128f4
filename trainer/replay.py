"""What a round is trained on: new traces, and stored ones that are replayed beside them.

    new ─────────────────────────────────────────┐
    last eight rounds ── recent_fraction ──┐     ├─► shuffled ─► batches
    whole buffer, domain by domain ────────┤     │
    anchors, one in eight ─────────────────┘ × replay_batches

Learning new traffic takes many passes over little data, so most replayed traces are recent. The
others keep the draft from forgetting. Anchors outlive the traces in the buffer: they are a uniform
sample of everything ever read (reservoir sampling, Vitter 1985, algorithm R). All draws depend only
on the seed and the round's number.

Anchors are stored in the buffer, not in the checkpoint. A killed round must be repeatable from the
last checkpoint. So each anchor has two places in the buffer, and a new one is written to the place
that the checkpoint does not name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from osd.config.schema import TrainerConfig
from osd.errors import ReplayBufferError
from osd.records import RoundSize, Trace

if TYPE_CHECKING:
    from buffers.base import TraceBuffer

logger = logging.getLogger(__name__)

RECENT_ROUNDS = 8
ANCHOR_ONE_IN = 8
PART = 64
"""Traces read at a time: those of a whole round may not fit in memory twice."""
MOST_NEW = 64
"""New traces of a round that are in memory at a time."""
MOST_POOLED = 576
"""With those that are replayed beside them, as long as one new trace leaves room."""
EVERYTHING = 1 << 62
"""More traces than any buffer holds."""
Cursor = dict[str, int]
Step = tuple[list[Trace], int]
"""Its traces, and the number of steps that the round is expected to have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayState:
    """What the mix remembers from round to round.

    Example:
        ReplayState(past=[{"": 40}, {"": 72}], num_offered=3, places=[0, 1, 0])
    """

    past: list[Cursor] = field(default_factory=list)
    """The cursor before each of the last rounds, oldest first."""
    num_offered: int = 0
    """Number of traces that the anchors were drawn from."""
    places: list[int] = field(default_factory=list)
    """Slot -> the place, 0 or 1, that holds its anchor."""


class Judges(NamedTuple):
    """New traces that judge a round, where too few are held out or the traffic has just changed.
    They are not trained on in it."""

    traces: Sequence[Trace] = ()
    since: float = 0.0
    """When the first trace of the new traffic was finished (Unix time); 0 = it has not changed."""


NO_JUDGES = Judges()


class NewTraces(NamedTuple):
    """Traces that were read from the buffer, and not trained on before."""

    traces: list[Trace]
    start: Cursor
    """Where reading began."""
    end: Cursor
    """Behind all traces that were read."""
    num_contradicting: int = 0
    """Rows left out because they contradict the text, once `trainable` was asked."""
    judges: Judges = NO_JUDGES

    def without_judges(self, traces: Sequence[Trace]) -> list[Trace]:
        """Those of these that may be trained on."""
        judging = {trace.trace_id for trace in self.judges.traces}
        return [trace for trace in traces if trace.trace_id not in judging]


class Unread:
    """The traces of a buffer that are behind a cursor, also where the buffer is an earlier copy of
    itself since: restored, or that of another server. The ids of what comes next lie before the
    cursor there, and would count as read."""

    def __init__(self, buffer: TraceBuffer) -> None:
        self._buffer = buffer
        self._seen: tuple[Cursor, Cursor] = ({}, {})
        """A cursor, and the last place behind which nothing was read."""

    def start(self, cursor: Cursor) -> Cursor:
        """Where reading begins behind a cursor."""
        known, start = self._seen
        return start if cursor == known else cursor

    def num(self, cursor: Cursor) -> int:
        """How many there are. To be asked again and again: what comes to another copy between two
        questions counts as read."""
        start = self._buffer.skip_to_newest(self.start(cursor), EVERYTHING)
        self._seen = cursor, start
        return self._buffer.num_unread(start)

    def newest(self, cursor: Cursor, most: int) -> NewTraces:
        """The newest of them, at most so many."""
        start = behind = self._buffer.skip_to_newest(self.start(cursor), most)
        found: list[Trace] = []
        while len(found) < most:
            more, behind = self._buffer.read(behind, most - len(found))
            if not more:
                break
            found += more
        return NewTraces(found, start, behind)


def size_of(config: TrainerConfig) -> RoundSize:
    """Of a round that nobody has sized."""
    return RoundSize(new_traces=config.max_new_traces, replay_batches=config.replay_batches)


class ReplayMix:
    """Chooses older traces from a buffer."""

    def __init__(self, config: TrainerConfig, buffer: TraceBuffer) -> None:
        self._config, self._buffer = config, buffer
        self.batches = config.replay_batches
        """Older batches replayed for every batch of new traces."""

    def begin_round(self, batches: int) -> None:
        """Replay so many older batches for every batch of new traces."""
        self.batches = batches

    @property
    def most_new(self) -> int:
        """New traces of a round that are trained on together. Whole batches of them, where there is
        room for one: else the last step of each part would be of a few traces."""
        most = max(1, min(MOST_NEW, MOST_POOLED // (1 + self.batches)))
        return most - most % self._config.batch_size or most

    def pool(
        self, fresh: Sequence[Trace], cursor: Cursor, state: ReplayState, rng: np.random.Generator
    ) -> list[Trace]:
        """New and replayed traces in the order of training. A trace may occur more than once."""
        num = len(fresh) * self.batches
        num_kept = min(self._config.num_anchors, len(state.places))
        slots = rng.integers(num_kept, size=num // ANCHOR_ONE_IN).tolist() if num_kept else []
        anchors = self._buffer.anchors([_number(slot, state.places[slot]) for slot in slots])
        num_recent = round((num - len(anchors)) * self._config.recent_fraction)
        since = state.past[0] if state.past else {}
        pool = [
            *fresh,
            *anchors,
            *self._sample(num_recent, rng, cursor, since),
            *self._sample(num - len(anchors) - num_recent, rng, cursor, None),
        ]
        return [pool[i] for i in rng.permutation(len(pool))]

    def remember(
        self,
        fresh: Sequence[Trace],
        before: Cursor,
        state: ReplayState,
        rng: np.random.Generator,
        *,
        read: tuple[Cursor, Cursor] | None = None,
    ) -> ReplayState:
        """Make some of `fresh` anchors, and return the state after the round.

        `before` is the cursor before the round; `read` says from where to where was read, if traces
        were skipped or left out. Traces that were purged while the round ran do not become anchors.
        When the server refuses the anchors, they are lost and the round is kept.
        """
        start, end = (before, {}) if read is None else read
        num = sum(last - start.get(domain, last) for domain, last in end.items())
        try:
            if kept := self._still_stored(fresh, start, num):
                state = self._offer(kept, state, rng)
            left = self._still_stored(fresh, start, num)  # a purge may have come in between
            if len(left) < len(fresh):
                state = self._without_purged(fresh, left, state)
        except ReplayBufferError as error:
            logger.warning("no new anchors are kept of this round: %s", error)
        return replace(state, past=[*state.past, before][-RECENT_ROUNDS:])

    def _offer(
        self, fresh: Sequence[Trace], state: ReplayState, rng: np.random.Generator
    ) -> ReplayState:
        """Draw the anchors again, from all earlier traces and these.

        Slot 0 is filled first. When it is empty, the anchors were purged or lost, and sampling
        starts over.
        """
        if state.places and not self._buffer.anchors([_number(0, state.places[0])]):
            state = replace(state, num_offered=0, places=[])
        places = list(state.places)
        chosen: dict[int, Trace] = {}
        for index, trace in enumerate(fresh, start=state.num_offered):
            slot = index if index < self._config.num_anchors else int(rng.integers(index + 1))
            if slot >= self._config.num_anchors:
                continue
            places += [0] * (slot + 1 - len(places))
            if slot < len(state.places):
                places[slot] = 1 - state.places[slot]
            chosen[_number(slot, places[slot])] = trace
        if chosen:
            self._buffer.set_anchors(chosen)
        return replace(state, num_offered=state.num_offered + len(fresh), places=places)

    def _still_stored(self, fresh: Sequence[Trace], start: Cursor, num: int) -> list[Trace]:
        """Those of `fresh`, which were among the `num` read from `start` on, that were not purged
        since."""
        missing, cursor = {trace.trace_id for trace in fresh}, start
        num_left = 2 * max(len(fresh), num) + PART
        while missing and num_left > 0:
            traces, cursor = self._buffer.read(cursor, PART)
            if not traces:
                break
            missing -= {trace.trace_id for trace in traces}
            num_left -= len(traces)
        return [trace for trace in fresh if trace.trace_id not in missing]

    def _without_purged(
        self, fresh: Sequence[Trace], left: Sequence[Trace], state: ReplayState
    ) -> ReplayState:
        """Empty the slots of anchors that are in `fresh` but not in `left`. Start over when `left`
        is empty."""
        gone = {trace.trace_id for trace in fresh} - {trace.trace_id for trace in left}
        emptied: dict[int, Trace | None] = {}
        for number in _numbers(state):
            for anchor in self._buffer.anchors([number]):
                if anchor.trace_id in gone:
                    emptied[number] = None
        if emptied:
            self._buffer.set_anchors(emptied)
        return state if left else replace(state, num_offered=0, places=[])

    def _sample(
        self, num: int, rng: np.random.Generator, cursor: Cursor, since: Cursor | None
    ) -> list[Trace]:
        """`num` traces, repeated when there are fewer different ones."""
        found: list[Trace] = []
        while len(found) < num:
            more = self._buffer.sample(num - len(found), rng, cursor, since=since)
            if not more:
                break
            found += more
        return found


def _number(slot: int, place: int) -> int:
    """The buffer's slot number for this place."""
    return 2 * slot + place


def _numbers(state: ReplayState) -> list[int]:
    """Both places of every slot."""
    return [_number(slot, place) for slot in range(len(state.places)) for place in (0, 1)]
