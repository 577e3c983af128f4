"""The requests that the control knows: what they accept, what their clients allow, and who proposes
for each.

    begin ──► load (what each is likely to accept) ──► caps ──► propose ──► learn ──► end

Legend: B requests of a step, G positions in a draft, M in a proposal of the memory, R newest
look-ups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.speculation.acceptance_breakdown import AcceptanceBreakdown
from serving.speculation.estimates import UNKNOWN, Acceptance, Watch
from serving.speculation.goodput import LEAST_SURVIVAL, Load, Plan, draft_of
from serving.speculation.memory.choice import Terms, num_better
from serving.speculation.memory.hybrid import CalibrationSlope, Hybrid, Level
from serving.speculation.memory.lookups import (
    NUM_LOOKUPS,
    NUM_LOOKUPS_OF_ALL,
    Lookups,
    Turns,
    found_lately,
)
from serving.speculation.memory.remembers import Remembers
from serving.speculation.memory.unverified import Judged, Unverified
from serving.speculation.step_seen import StepSeen


@dataclass(slots=True)
class _Request:
    slot: int
    client_cap: int
    is_counted: bool
    cap: int
    """draft tokens worth verifying, where a plan verifies in part"""
    gain: float | None = None
    """how many of them are accepted in the mean; None before the first decision with it"""
    estimated: Sequence[float] = ()
    """tokens accepted of a draft of each length, as of the newest decision; none before the first
    one"""
    believed: Sequence[float] = ()
    """the same, with how far requests differ"""
    lookups: Lookups | None = None
    found: float = 0.0
    """tokens that the newest look-up expects to be accepted"""
    num_seen: int = 0
    """tokens that the memory knows of"""


class Requests:
    """One per engine. Requests that did not begin here are passed over."""

    def __init__(
        self,
        k_max: int,
        proposers: Sequence[str],
        predicted: float | None,
        memory: Remembers | None = None,
    ) -> None:
        self.breakdown = AcceptanceBreakdown(k_max)
        self.judged: list[Judged] = []
        """What is known since it was last taken of drafts that nobody verified."""
        self._k_max, self._proposers = k_max, proposers
        self._draft = Acceptance(k_max, UNKNOWN if predicted is None else predicted)
        self._memory = memory
        self._most = max(k_max, memory.k) if memory is not None else k_max
        self._lookups = Lookups(NUM_LOOKUPS_OF_ALL, memory.k) if memory is not None else None
        self._unverified = Unverified()
        self._hybrid, self._watch, self._level = Hybrid(), Watch(), Level()
        self._slope = CalibrationSlope()
        self.is_bounded = False
        """As in `Load`."""
        self.has_changed = False
        """Whether the traffic has changed, by what the memory finds, since this was last unset."""
        self._requests: dict[str, _Request] = {}
        self._is_asked = False
        """Whether the memory was asked since requests were last served: it will be again."""
        self._turns = Turns()

    # -- requests come and go ---------------------------------------------------------------------

    def begin(
        self,
        req_id: str,
        domain: str,
        client_cap: int | None,
        is_counted: bool,
        *,
        prompt: Sequence[int] = (),
        scope: str = "",
        is_kept: bool = True,
    ) -> None:
        """A request has come; see `Speculation.begin`."""
        if req_id in self._requests:
            return  # its client goes on with it
        most = self._most if client_cap is None else max(0, min(client_cap, self._most))
        cap = min(most, self._k_max)
        request = _Request(self._draft.open(domain), most, is_counted, cap)
        if self._memory is not None and is_counted and most:
            request.lookups = Lookups(NUM_LOOKUPS, self._memory.k)
            request.num_seen = len(prompt)
            self._memory.begin(req_id, prompt, scope=scope, is_kept=is_kept)
        self._requests[req_id] = request

    def end(self, req_id: str) -> None:
        """A request has gone."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self.judged += self._unverified.end(req_id)
            self.breakdown.add_finished(self._draft.close(request.slot))
            if request.lookups is not None and self._memory is not None:
                self._memory.end(req_id)

    def is_counted(self, req_id: str) -> bool:
        return (found := self._requests.get(req_id)) is None or found.is_counted

    def gone(self, alive: Collection[str]) -> set[str]:
        """Known requests that are not alive any more. All that are alive must be known."""
        if len(self._requests) <= len(alive):
            return set()
        return self._requests.keys() - set(alive)

    def restart(self, predicted: float | None) -> None:
        """Forget what was learnt of the draft model. `predicted`: the conditional acceptance it was
        measured with elsewhere."""
        self._unverified.clear()
        self._watch = Watch()
        self._forget(predicted)

    # -- before a step ----------------------------------------------------------------------------

    def load(self, req_ids: Sequence[str], context: int) -> Load:
        """The requests that decode, with what each is likely to accept."""
        requests = self._known(req_ids)
        draft_BG = None
        if "draft" in self._proposers:
            draft_BG = self._survival(requests)
            for b, request in enumerate(requests):
                if request.client_cap < self._k_max:
                    draft_BG[b, request.client_cap :] = 0.0
        allowed_B = np.array([request.client_cap for request in requests], np.int64)
        memory_BRM = self._found_lately(requests)
        ratio_BR = None if memory_BRM is None else self._hybrid.ratio(memory_BRM.sum(2))
        shown = draft_BG, memory_BRM, ratio_BR, allowed_B
        return Load(len(req_ids), context, *shown, self.is_bounded)

    def set_caps(self, plan: Plan, req_ids: Sequence[str], load: Load) -> None:
        """Decide how many draft tokens of each request are verified under a plan."""
        if not plan.passes or not (plan.draft_price > 0 or plan.is_mixed):
            return
        assert load.draft_BG is not None
        num_B, gain_B = draft_of(load, plan)
        for b, request in enumerate(self._known(req_ids)):
            request.cap, request.gain = int(num_B[b]), float(gain_B[b])

    def cap(self, req_id: str, plan: Plan) -> int:
        """Draft tokens of this request that are verified under the plan."""
        request = self._requests.get(req_id)
        return plan.passes if request is None else self._cap(request, plan)

    def has_cap_below(self, k: int) -> bool:
        """Whether any client allows fewer draft tokens."""
        return any(request.client_cap < k for request in self._requests.values())

    def look_up(self, req_id: str, plan: Plan, ahead: Sequence[int] = ()) -> list[int]:
        """What the memory proposes in the place of the draft; nothing where the draft proposes, but
        it is noted what is found. `ahead`: tokens that were sampled, and not served yet."""
        request = self._requests.get(req_id)
        if request is None or request.lookups is None or self._memory is None:
            return []
        assert self._lookups is not None
        if not plan.may_memory_propose and not self._turns.is_due(req_id):
            return []
        self._is_asked |= not ahead  # of tokens in flight nothing can be looked up beforehand
        found = self._memory.propose(req_id, self._memory.k, LEAST_SURVIVAL, ahead=ahead)
        request.lookups.add(found.survival_K)
        self._lookups.add(found.survival_K)
        request.found = float(found.survival_K.sum()) if found.tokens else 0.0
        self.has_changed |= self._level.add(request.found)
        ratio = self._hybrid.ratio_beside(request.found)
        num = num_better(found, plan, self._terms(request, plan), ratio)
        return found.tokens[:num]

    def terms(self, req_id: str, plan: Plan) -> Terms | None:
        """What the memory must better for this request; None where it is not asked."""
        request = self._requests.get(req_id)
        if request is None or request.lookups is None:
            return None
        return self._terms(request, plan)

    def num_expected(self, req_id: str, plan: Plan) -> int:
        """How many tokens the memory is likely to have verified for this request, by what it found
        lately: those that are worth it in the mean."""
        request = self._requests.get(req_id)
        if request is None or request.lookups is None or self._lookups is None:
            return 0
        if not plan.may_memory_propose:
            return 0
        survival_M = request.lookups.completed(NUM_LOOKUPS, self._lookups).mean(0)
        num = int((survival_M > plan.price).sum())
        return min(num, request.client_cap, plan.k)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of each kind of look-up (`memory/hybrid.py`)."""
        return self._hybrid.ratios

    def found(self, req_ids: Iterable[str]) -> dict[str, float]:
        """How many tokens the newest look-up of each request expects to be accepted."""
        return {r: self._requests[r].found for r in req_ids if r in self._requests}

    def can_show_acceptance(self, req_ids: Sequence[str]) -> bool:
        """Whether verifying a draft of any of these requests would teach anything."""
        return any(r.is_counted and r.client_cap > 0 for r in self._known(req_ids))

    # -- after a step -----------------------------------------------------------------------------

    def add_unverified(
        self, req_id: str, step: int, num_tokens: int, num_outputs: int, draft: Sequence[int]
    ) -> None:
        """This draft was proposed in the step; the memory's tokens or none will be verified."""
        request = self._requests.get(req_id)
        if request is not None and request.is_counted and request.client_cap:
            self._unverified.add(req_id, step, num_tokens, num_outputs, draft, request.found)

    def served(
        self, answers: Iterable[tuple[str, Sequence[int]]], may_memory_propose: bool = True
    ) -> None:
        """Requests now have these tokens, each from its prompt on. Where the memory may not propose
        what may follow them, few are looked up."""
        new: list[tuple[str, Sequence[int]]] = []
        for req_id, tokens in answers:
            self.judged += self._unverified.served(req_id, tokens)
            request = self._requests.get(req_id)
            if request is not None and request.lookups is not None:
                new.append((req_id, tokens[request.num_seen :]))
                request.num_seen = len(tokens)
        if self._memory is not None:
            new, num = self._turns.begin(new, is_unused=not may_memory_propose)
            k = self._memory.k if self._is_asked else 0
            self._memory.advance_all(new, k, LEAST_SURVIVAL, num)
        self._is_asked = False

    def learn(self, step: StepSeen) -> tuple[int, int]:
        """Learn what a step accepted. Returns how many first tokens of the draft model were tested
        and accepted."""
        known = [i for i, req_id in enumerate(step.req_ids) if req_id in self._requests]
        if not known:
            return 0, 0
        requests = [self._requests[step.req_ids[i]] for i in known]
        if not any(step.drafted) and not step.judged:
            self._draft.fade(np.array([r.slot for r in requests if r.is_counted], np.int64))
            return 0, 0
        is_draft = [step.req_ids[i] not in step.from_memory for i in known]
        drafted_B = np.array([step.drafted[i] for i in known], np.int64) * is_draft
        accepted_B = np.array([step.accepted[i] for i in known], np.int64) * is_draft
        counted_B = np.array([r.is_counted for r in requests])
        slot_B = np.array([r.slot for r in requests], np.int64)
        self._draft.add(slot_B[counted_B], drafted_B[counted_B], accepted_B[counted_B])
        num_tested = int(((drafted_B > 0) & counted_B).sum())
        num_accepted = int(((accepted_B > 0) & counted_B).sum())
        if num_tested:
            lengths = [step.num_tokens[i] for i in known]
            outputs = [step.num_outputs[i] for i in known if step.num_outputs]
            self.breakdown.add_step(drafted_B * counted_B, accepted_B * counted_B, lengths, outputs)
        for b, request in enumerate(requests):
            if drafted_B[b] and request.lookups is not None:
                found = step.found.get(step.req_ids[known[b]], request.found)
                self._learn_beside(request, found, drafted_B[b], accepted_B[b])
        for one in step.judged:
            self._learn_of_unverified(one)
        return num_tested + len(step.judged), num_accepted + sum(
            one.num_accepted > 0 for one in step.judged
        )

    # -- inside -----------------------------------------------------------------------------------

    def _forget(self, predicted: float | None) -> None:
        self._hybrid.restart()
        self._slope = CalibrationSlope()
        self._draft.restart([request.slot for request in self._requests.values()], predicted)
        for request in self._requests.values():
            request.gain, request.believed = None, ()

    def _learn_of_unverified(self, one: Judged) -> None:
        drafted_B, accepted_B = np.array([one.num_drafted]), np.array([one.num_accepted])
        if (request := self._requests.get(one.req_id)) is not None:
            self._draft.add(np.array([request.slot]), drafted_B, accepted_B)
            self._learn_beside(request, one.found, one.num_drafted, one.num_accepted)
        self.breakdown.add_step(drafted_B, accepted_B, [one.num_tokens], [one.num_outputs])

    def _cap(self, request: _Request, plan: Plan) -> int:
        allowed = min(plan.passes, request.client_cap)
        return min(allowed, request.cap) if plan.draft_price > 0 else allowed

    def _terms(self, request: _Request, plan: Plan) -> Terms:
        gain = self._gain(request, plan) if plan.passes else 0.0
        return Terms(request.client_cap, self._cap(request, plan), gain)

    def _gain(self, request: _Request, plan: Plan) -> float:
        if request.gain is None:
            survival_G = self._survival([request])[0]
            request.gain = float(survival_G[: self._cap(request, plan)].sum())
        return request.gain

    def _survival(self, requests: Sequence[_Request]) -> np.ndarray:
        """float [B, G]: probability that a draft is accepted up to each position."""
        survival_BG = self._draft.survival(np.array([r.slot for r in requests], np.int64))
        if self._memory is None:
            return survival_BG
        believed_BG = self._slope.believed(survival_BG)
        gains_B2G = np.stack([survival_BG, believed_BG], 1).cumsum(2).tolist()
        for request, (estimated, believed) in zip(requests, gains_B2G, strict=True):
            request.estimated, request.believed = estimated, believed
        return believed_BG

    def _learn_beside(
        self, request: _Request, found: float, num_drafted: int, num_accepted: int
    ) -> None:
        if request.believed:
            ratio = self._hybrid.ratio_beside(found)
            self._slope.add(request.estimated, num_drafted, num_accepted, ratio)
            self._hybrid.add(found, request.believed[num_drafted - 1], num_accepted)
            surprise = self._watch.add(request.believed[0], num_accepted > 0)
            if surprise is not None:
                self._forget(surprise)

    def _found_lately(self, requests: Sequence[_Request]) -> np.ndarray | None:
        if self._lookups is None or not requests:
            return None
        return found_lately([request.lookups for request in requests], self._lookups)

    def _known(self, req_ids: Sequence[str]) -> list[_Request]:
        return [self._requests[r] for r in req_ids if r in self._requests]


def whole_number(value: Any) -> int | None:
    """A client's limit of draft tokens: 3, 3.0 or "3". None for anything else (2.9, "2.9", true,
    -1, NaN, a list)."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return int(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < 1e9 and value % 1 == 0 else None
