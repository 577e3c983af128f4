"""The requests that the control knows: what they accept, what their clients allow, and how many of
their draft tokens are verified.

    begin ──► load (what each is likely to accept) ──► caps ──► learn (what it accepted) ──► end

Legend: B requests of a step, G positions in a draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from serving.speculation.acceptance_breakdown import AcceptanceBreakdown
from serving.speculation.estimates import UNKNOWN, Acceptance
from serving.speculation.goodput import Load, Plan, caps
from serving.speculation.ngram import Lookup, Shadow
from serving.speculation.step_seen import StepSeen

NGRAM_ACCEPTANCE = 0.3
"""Conditional acceptance of n-grams before any was seen."""


@dataclass(slots=True)
class _Request:
    slot: int
    ngram_slot: int
    client_cap: int
    is_counted: bool
    cap: int
    """draft tokens worth verifying, where a plan verifies in part"""
    lookup: Lookup = field(default_factory=Lookup)
    shadow: Shadow = field(default_factory=Shadow)


class Requests:
    """One per engine. Requests that did not begin here are passed over."""

    def __init__(self, k_max: int, proposers: Sequence[str], predicted: float | None) -> None:
        self.breakdown = AcceptanceBreakdown(k_max)
        self._k_max, self._proposers = k_max, proposers
        self._draft = Acceptance(k_max, UNKNOWN if predicted is None else predicted)
        self._ngram = Acceptance(k_max, NGRAM_ACCEPTANCE)
        self._requests: dict[str, _Request] = {}

    # -- requests come and go ---------------------------------------------------------------------

    def begin(self, req_id: str, domain: str, client_cap: int | None, is_counted: bool) -> None:
        """A request has come; see `Speculation.begin`."""
        if req_id in self._requests:
            return  # its client goes on with it
        cap = self._k_max if client_cap is None else max(0, min(client_cap, self._k_max))
        self._requests[req_id] = _Request(
            self._draft.open(domain), self._ngram.open(domain), cap, is_counted, cap
        )

    def end(self, req_id: str) -> None:
        """A request has gone."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self.breakdown.add_finished(self._draft.close(request.slot))
            self._ngram.close(request.ngram_slot)

    def gone(self, alive: Collection[str]) -> set[str]:
        """Known requests that are not alive any more. All that are alive must be known."""
        if len(self._requests) <= len(alive):
            return set()
        return self._requests.keys() - set(alive)

    def restart(self, predicted: float | None) -> None:
        """Forget what was learnt of the draft model. `predicted`: the conditional acceptance it was
        measured with elsewhere."""
        self._draft.restart([request.slot for request in self._requests.values()], predicted)

    # -- before a step ----------------------------------------------------------------------------

    def load(self, req_ids: Sequence[str], context: int) -> Load:
        """The requests that decode, with what each is likely to accept."""
        requests = self._known(req_ids)
        survival: dict[Any, np.ndarray] = {}
        if "draft" in self._proposers:
            survival["draft"] = self._draft.survival(np.array([r.slot for r in requests], np.int64))
        if "ngram" in self._proposers:
            survival["ngram"] = self._ngram.survival(
                np.array([r.ngram_slot for r in requests], np.int64)
            )
        for b, request in enumerate(requests):
            if request.client_cap < self._k_max:
                for survival_BG in survival.values():
                    survival_BG[b, request.client_cap :] = 0.0
        allowed = [self._client_cap(req_id) for req_id in req_ids]
        return Load(len(req_ids), context, survival, np.array(allowed, np.int64))

    def set_caps(self, plan: Plan, req_ids: Sequence[str], load: Load) -> None:
        """Decide how many draft tokens of each request are verified under a plan that verifies in
        part."""
        if plan.min_survival > 0:
            found = caps(load.survival["draft"], plan).tolist()
            for request, cap in zip(self._known(req_ids), found, strict=True):
                request.cap = cap

    def cap(self, req_id: str, plan: Plan) -> int:
        """Draft tokens of this request that are verified under the plan."""
        request = self._requests.get(req_id)
        if request is None:
            return plan.k
        allowed = min(plan.k, request.client_cap)
        return min(allowed, request.cap) if plan.min_survival > 0 else allowed

    def has_cap_below(self, k: int) -> bool:
        """Whether any client allows fewer draft tokens."""
        return any(request.client_cap < k for request in self._requests.values())

    def lookup(self, req_id: str, tokens: Sequence[int], plan: Plan) -> list[int]:
        """What n-grams propose for a request under the plan."""
        request = self._requests.get(req_id)
        if request is None:
            return []
        return request.lookup.propose(tokens, self.cap(req_id, plan))

    def can_show_acceptance(self, req_ids: Sequence[str]) -> bool:
        """Whether verifying a draft of any of these requests would teach anything."""
        return any(r.is_counted and r.client_cap > 0 for r in self._known(req_ids))

    # -- after a step -----------------------------------------------------------------------------

    def learn(self, step: StepSeen) -> tuple[int, int]:
        """Learn what a step accepted. Returns how many first tokens of the draft model were tested
        and accepted."""
        known = [i for i, req_id in enumerate(step.req_ids) if req_id in self._requests]
        if not known:
            return 0, 0
        requests = [self._requests[step.req_ids[i]] for i in known]
        if step.proposed_by.plan.proposer != "ngram" and not any(step.drafted):
            self._draft.fade(np.array([r.slot for r in requests if r.is_counted], np.int64))
            return 0, 0
        drafted_B = np.array([step.drafted[i] for i in known], np.int64)
        accepted_B = np.array([step.accepted[i] for i in known], np.int64)
        if step.proposed_by.plan.proposer == "ngram":
            self._learn_of_ngrams(requests, drafted_B, accepted_B)
            drafted_B, accepted_B = np.zeros_like(drafted_B), np.zeros_like(accepted_B)
        counted_B = np.array([r.is_counted for r in requests])
        slot_B = np.array([r.slot for r in requests], np.int64)
        self._draft.add(slot_B[counted_B], drafted_B[counted_B], accepted_B[counted_B])
        num_tested = int(((drafted_B > 0) & counted_B).sum())
        if num_tested:
            lengths = [step.num_tokens[i] for i in known]
            outputs = [step.num_outputs[i] for i in known if step.num_outputs]
            self.breakdown.add_step(drafted_B * counted_B, accepted_B * counted_B, lengths, outputs)
        return num_tested, int(((accepted_B > 0) & counted_B).sum())

    def _learn_of_ngrams(
        self, requests: Sequence[_Request], drafted_B: np.ndarray, accepted_B: np.ndarray
    ) -> None:
        slot_B = np.array([r.ngram_slot for r in requests], np.int64)
        judged_B = np.array([r.is_counted and r.client_cap > 0 for r in requests])
        # Where nothing was found, that counts as a draft of one token that was not accepted.
        self._ngram.add(slot_B[judged_B], np.maximum(drafted_B, 1)[judged_B], accepted_B[judged_B])

    def look_up_in_shadow(
        self, req_ids: Sequence[str], tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Judge earlier lookups by what has been written since, and look up anew now and then."""
        slots, proposed_B, accepted_B = [], [], []
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is None:
                continue
            judged = request.shadow.step(request.lookup, partial(tokens_of, req_id), self._k_max)
            if judged is not None and request.is_counted:
                slots.append(request.ngram_slot)
                proposed_B.append(judged[0])
                accepted_B.append(judged[1])
        if slots:
            self._ngram.add(np.array(slots), np.array(proposed_B), np.array(accepted_B))

    def _client_cap(self, req_id: str) -> int:
        request = self._requests.get(req_id)
        return self._k_max if request is None else request.client_cap

    def _known(self, req_ids: Sequence[str]) -> list[_Request]:
        return [self._requests[r] for r in req_ids if r in self._requests]


def whole_number(value: Any) -> int | None:
    """A client's limit of draft tokens: 3, 3.0 or "3". None for anything else (2.9, "2.9", true,
    -1, NaN, a list)."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return int(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < 1e9 and value % 1 == 0 else None
