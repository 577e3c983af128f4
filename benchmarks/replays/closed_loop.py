"""A replay in which the service's own control of speculation decides what every step proposes.

    recorded requests, so many at a time
      ──► Speculation.plan ──► a modelled step ──► Speculation.observe ──► ...
          draft, memory or     seconds as measured
          nothing              (`step_times.py`)

The control is the code that serves (`serving/speculation/control.py`). It sees steps that last as
long as measured steps, with random noise, and decides by them. The replay follows vLLM: the
proposals of a step are verified by the next one, a request's first step verifies the proposals made
at the end of its prefill, and tokens beyond the end of an answer are verified in vain. Prefill, and
the time for decisions and swaps, are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.replays.curve import StepCounts
from benchmarks.replays.recording import Recorded
from benchmarks.replays.served import Served, matches_of, right_from
from benchmarks.replays.step_times import ModelledStepTimes
from osd.config.schema import Config
from osd.records import ACCEPTED, PLAIN, REJECTED
from serving.speculation.control import Settings, Speculation
from serving.speculation.goodput import Plan
from serving.speculation.memory.remembers import Remembers
from serving.speculation.proposals import memory_of
from serving.speculation.step_seen import DraftWork, Stamp, StepSeen
from serving.speculation.step_times import CELL_SIZE, Shape
from trainer.draft import Draft, load_draft
from trainer.eagle3.features import TargetFeatures

NOISE = 0.05
"""Standard deviation of the logarithm of a step's time."""
DRAFT, MEMORY = "draft", "memory"


@dataclass(slots=True)
class _Running:
    """A request that decodes."""

    index: int
    tokens: list[int]
    """Prompt and answer to its end."""
    num_prompt: int
    matches: np.ndarray
    """bool [G, T - 1]: where the serving draft is right, at each depth of a step."""
    at: int = 1
    """Output tokens so far."""
    num_proposed: int = 0
    """Draft tokens that its next step verifies."""
    found: Sequence[int] = ()
    """Those of the memory; empty where the draft proposed."""
    kinds: list[int] = field(default_factory=lambda: [PLAIN])
    seconds: float = 0.0
    by: dict[str, list[int]] = field(default_factory=lambda: {DRAFT: [0] * 4, MEMORY: [0] * 4})
    """proposer -> drafts, drafted, tested, accepted"""
    num_steps: int = 0

    @property
    def name(self) -> str:
        return str(self.index)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.at

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_tokens

    @property
    def proposer(self) -> str:
        return MEMORY if self.found else DRAFT

    def num_right(self) -> int:
        """How many of the proposed tokens are accepted."""
        num = min(self.num_proposed, self.num_left)
        if not self.found:
            right = right_from(self.matches, self.at - 1, num)
        else:
            served = self.tokens[self.num_tokens : self.num_tokens + num]
            right = np.array([a == b for a, b in zip(self.found, served, strict=False)], bool)
        wrong = np.flatnonzero(~right)
        return int(wrong[0]) if len(wrong) else num

    def advance(self, num_right: int) -> None:
        """A step accepted so many, and the target adds a token."""
        num_tested = min(num_right + 1, self.num_proposed, self.num_left)
        self.num_steps += 1
        if self.num_proposed:
            for place, num in enumerate((1, self.num_proposed, num_tested, num_right)):
                self.by[self.proposer][place] += num
        new = [ACCEPTED] * num_right + [REJECTED if num_tested > num_right else PLAIN]
        self.kinds += new[: self.num_left]
        self.at += min(num_right + 1, self.num_left)

    def ended(self) -> Served:
        all_ = [sum(both) for both in zip(*self.by.values(), strict=True)]
        return Served(
            index=self.index,
            counts=self._counts(all_),
            of_the_draft=self._counts(self.by[DRAFT]),
            kind_T=np.array(self.kinds, np.int8),
            seconds=self.seconds,
        )

    def _counts(self, numbers: Sequence[int]) -> StepCounts:
        drafts, drafted, tested, accepted = numbers
        return StepCounts(
            tokens=len(self.kinds) - 1,
            steps=self.num_steps,
            drafts=drafts,
            drafted=drafted,
            tested=tested,
            accepted=accepted,
        )


class ClosedLoop:
    """Serves recorded requests, as many at a time as the step times are of and in modelled time,
    under the control of speculation."""

    def __init__(
        self,
        requests: Sequence[Recorded],
        config: Config,
        times: ModelledStepTimes,
        *,
        seed: int,
        memory: Remembers | None = None,
        features: TargetFeatures | None = None,
    ) -> None:
        """`memory`: in the place of the service's own. `features`: of the target, which a head
        reads."""
        given = config.speculation
        settings = Settings(
            mode=given.mode,
            k_max=given.k_max,
            proposers=tuple(given.proposers),
            is_drawn=given.is_sampled,
            net_interval_seconds=given.net_interval_seconds,
            net_window_seconds=given.net_window_seconds,
            seed=seed,
            memory_k_max=given.memory_k_max,
            memory_bytes=given.memory_bytes,
        )
        self.clock = 0.0
        """Modelled seconds of decoding so far."""
        self.drafting = 0.0
        """Those of them in which the draft model drafted."""
        self.speculation = Speculation(
            settings, clock=lambda: self.clock, memory=memory or memory_of(settings)
        )
        self._requests, self._times, self._features = requests, times, features
        self._k_max, self._is_sampled = given.k_max, given.is_sampled
        self._rng = np.random.default_rng(seed)
        self.model: Draft | None = None
        """The draft that serves."""
        self._running: list[_Running] = []
        self._proposed_by = Stamp(self.speculation.present, given.mode)
        """The stamp of the step that proposed what the next step verifies."""
        self._sleeps = False
        self._only_decodes = True
        """Whether no prompt is read in the next step."""
        self._measure_beforehand()

    def swap(self, draft: str | Path, predicted: float | None) -> None:
        """Requests under way go on as with the draft they began with: a new one would read what the
        old one left in its KV cache, and be worse than it is."""
        self.serve_with(load_draft(draft, self._features))
        self.speculation.restart(predicted)

    def serve_with(self, model: Draft) -> None:
        """As `swap`, of a draft that changes little by little: what is known of it goes on."""
        self.model = model

    def serve(self) -> Iterator[Served]:
        coming = iter(range(len(self._requests)))
        while True:
            while (
                len(self._running) < self._times.batch and (index := next(coming, None)) is not None
            ):
                self._admit(index)
            if not self._running:
                return
            if all(one.num_left for one in self._running):
                self._step()
            yield from self._leave()

    def _admit(self, index: int) -> None:
        request = self._requests[index]
        tokens = [*request.prompt_ids.tolist(), *request.output_ids.tolist()]
        one = _Running(index, tokens, len(request.prompt_ids), self._matches(index))
        self.speculation.begin(one.name, prompt=tokens[: one.num_prompt])
        self._served(one)
        self._propose(one, self.speculation.present)
        self._running.append(one)

    def _leave(self) -> Iterator[Served]:
        """Those that have ended."""
        for one in [one for one in self._running if not one.num_left]:
            self._running.remove(one)
            self.speculation.end(one.name)
            yield one.ended()

    def _price(self, drafted: Sequence[int], passes: int) -> tuple[float, float]:
        """Seconds of a step that verifies so many draft tokens of each request, and of the passes
        of the draft model at its end, without noise."""
        verifying = self._times.step(sum(drafted) / len(drafted), drafts=False)
        return verifying, self._num_drafts(passes) * self._times.draft_s

    def _num_drafts(self, passes: int) -> int:
        """How often a draft of that many passes is paid for."""
        return 1 + self._sleeps if passes else 0  # it catches up

    def _step(self) -> None:
        running = self._running
        stamp = self.speculation.plan(
            [one.name for one in running], sum(one.num_tokens for one in running)
        )
        passes = stamp.plan.passes
        drafted = [one.num_proposed for one in running]
        seconds, drafting = self._price(drafted, passes)
        self._sleeps = not passes
        noise = float(np.exp(self._rng.normal(0, NOISE)))
        seconds = noise * (seconds + drafting)
        self.drafting += noise * drafting
        self.clock += seconds
        right = [one.num_right() for one in running]
        context = sum(one.num_tokens for one in running)
        lengths, outputs = [one.num_tokens for one in running], [one.at for one in running]
        # What an answer would have gone on with is not known: nothing is said of what lies beyond
        # its end, though the step took what verifying it takes. Once per answer, a step so seems to
        # have been narrower than it was.
        known = [
            min(n, r if r == one.num_left else n)
            for one, n, r in zip(running, drafted, right, strict=True)
        ]
        from_memory = {one.name for one in running if one.found}
        for one, num in zip(running, right, strict=True):
            one.seconds += seconds / self._times.batch
            one.advance(num)
            self._served(one)
        known_requests = self.speculation.requests
        judged, known_requests.judged = known_requests.judged, []
        self.speculation.observe(
            StepSeen(
                req_ids=[one.name for one in running],
                drafted=known,
                accepted=right,
                stamp=stamp,
                proposed_by=self._proposed_by,
                draft=DraftWork(self._proposed_by.plan.passes).next(passes),
                context=context,
                is_pure=self._only_decodes,
                seconds=seconds,
                num_tokens=lengths,
                num_outputs=outputs,
                from_memory=from_memory,
                judged=judged,
            )
        )
        self.speculation.times.settle()
        self._proposed_by = stamp
        for one in running:
            self._propose(one, stamp.plan)

    def _served(self, one: _Running) -> None:
        self.speculation.requests.served([(one.name, one.tokens[: one.num_tokens])])

    def _propose(self, one: _Running, plan: Plan) -> None:
        """At the end of a step."""
        one.num_proposed = min(plan.passes, self.speculation.cap(one.name))
        one.found = self.speculation.look_up(one.name)
        if one.found:
            one.num_proposed = len(one.found)
        is_drawn = self._is_sampled and self._requests[one.index].temperature > 0
        if (one.found or not one.num_proposed) and not is_drawn:
            # What the draft would propose is known by where it is right.
            right = self._draft_of(one, plan.passes)
            self.speculation.requests.add_unverified(one.name, 0, one.num_tokens, one.at, right)

    def _draft_of(self, one: _Running, passes: int) -> list[int]:
        """The draft's tokens, -1 where it is wrong."""
        served = one.tokens[one.num_tokens : one.num_tokens + passes]
        right = right_from(one.matches, one.at - 1, passes)
        return [t if is_right else -1 for t, is_right in zip(served, right, strict=True)]

    def _matches(self, index: int) -> np.ndarray:
        assert self.model is not None, "swap() comes first"
        return matches_of(self.model, self._requests[index], is_sampled=self._is_sampled)

    def _measure_beforehand(self) -> None:
        """What an engine measures before its port answers."""
        batch = self._times.batch
        rows = [
            {
                **Shape(batch, batch * (1 + k), 0, k)._asdict(),
                "seconds": self._times.step(k, drafts=k > 0),
                "steps": CELL_SIZE,
            }
            for k in (0, 1, self._k_max)
        ]
        self.speculation.times.load_rows(rows)
