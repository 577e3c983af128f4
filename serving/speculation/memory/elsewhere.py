"""Whose tokens the next step verifies, where the workers are processes of their own and draft
tokens stay with them.

    a step is scheduled ──► it asks the memory in the workers' processes (`ranks.py`), and the next
                            one leaves room for what that is likely to find
    its output comes ─────► which requests' tokens were the memory's, and whose drafts nobody
                            verified

The scheduler has a memory too, which is told of the same tokens when they come: by what that finds,
a step late, it is known what to expect of the other one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from serving.speculation.control import Settings, Speculation
from serving.speculation.memory.messages import Ask, Begun, Told
from serving.speculation.proposals import Proposals
from serving.speculation.step_seen import HELD, Scheduled
from serving.vllm.schedules import asks_in_worker, has_workers_elsewhere


class ProposalsElsewhere(Proposals):
    """As `Proposals`, of an engine whose workers ask a memory of their own."""

    def __init__(self, osd: Speculation, settings: Settings) -> None:
        super().__init__(osd, settings)
        osd.requests.is_bounded = True
        self._begun: dict[str, Begun] = {}
        """Of all requests that may be proposed anything."""
        self._told: dict[str, int] = {}
        """What was found at the end of the newest step whose output has come."""
        self._step = 0
        """Its number."""

    def begin(self, request: Any, is_undrafted: bool) -> Begun:
        begun = super().begin(request, is_undrafted)
        self._begun[request.request_id] = begun
        return begun

    def ask(self, output: Any) -> Ask | None:
        """Ask the memory at the end of this step, if it may propose then."""
        plan, known = self._osd.present, self._osd.requests
        output.osd_ask = None
        if self.is_asked_by_worker and plan.may_memory_propose:
            terms = {r: known.terms(r, plan) for r in output.num_scheduled_tokens}
            asked = {req_id: each for req_id, each in terms.items() if each is not None}
            output.osd_ask = Ask(plan, known.ratios, asked)
        return output.osd_ask

    def make_room(self, output: Any, requests: Any) -> None:
        """The draft's tokens are as many as there is room for, where the memory finds nothing."""
        ask = self.ask(output)
        for req_id in output.num_scheduled_tokens:
            request = requests[req_id]
            if request.is_prefill_chunk:
                continue
            room = self._osd.cap(req_id)
            if ask is not None:
                room = max(room, self._osd.requests.num_expected(req_id, ask.plan))
            if room != len(request.spec_token_ids):
                request.spec_token_ids = [-1] * room

    def scheduled(self, output: Any) -> frozenset[str]:
        super().scheduled(output)
        if not hasattr(output, "osd_ask"):
            self.ask(output)
        cached = output.scheduled_cached_reqs
        names = [*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids]
        output.osd_begun = {each: self._begun[each] for each in names if each in self._begun}
        return frozenset()  # known when its output comes

    def verified(self, step: Scheduled, output: Any, result: Any, requests: Any) -> frozenset[str]:
        """Without a pass of the draft at the end of the step before it, all are the memory's."""
        told: Told | None = getattr(result, "osd_told", None)
        self.is_asked_by_worker |= told is not None
        told = told or Told({}, {})
        if told.problem:
            raise RuntimeError(f"the memory of the first rank has ended: {told.problem}")
        found, self._told = self._told, told.found
        proposed_in, self._step = self._step, output.osd_step
        for req_id, draft in told.unverified.items():
            if (request := requests.get(req_id)) is not None:
                at = request.num_tokens, request.num_output_tokens
                self._osd.requests.add_unverified(req_id, proposed_in, *at, draft)
        if step.proposed_by.reason == HELD:
            return frozenset()
        drafts = output.scheduled_spec_decode_tokens.keys()
        return frozenset(found.keys() & drafts if step.proposed_by.plan.passes else drafts)

    def redraft(self, req_ids: Iterable[str], drafts: list[list[int]], requests: Any) -> None:
        """Where the next step is scheduled after this one has ended: it verifies what was found."""
        present = self._osd.present
        for i, req_id in enumerate(req_ids):
            drafted = min(present.passes, self._osd.cap(req_id))
            drafts[i] = drafts[i][: self._told.get(req_id, drafted)]

    def told(self, output: Any, requests: Iterable[Any]) -> None:
        """What the memory here would have found stands for what the other one finds."""
        super().told(output, ())
        if self.is_asked_by_worker:
            for request in requests:
                self._osd.look_up(request.request_id)

    def end(self, req_id: str) -> None:
        super().end(req_id)
        self._begun.pop(req_id, None)


def proposals_of(osd: Speculation, settings: Settings, config: Any, *, is_v2: bool) -> Proposals:
    """Of an engine with this configuration of vLLM's."""
    is_left = osd.memory is not None and asks_in_worker(config, is_v2)
    kind = ProposalsElsewhere if is_left and has_workers_elsewhere(config) else Proposals
    proposals = kind(osd, settings)
    proposals.is_left_to_worker = is_left
    return proposals


def most_waiting(answers: Iterable[str]) -> Any:
    """What all memories of an engine answer to one command, in JSON: the most tokens that wait in
    any, where they count them.

    Raises:
        RuntimeError: One has failed.
    """
    read = [json.loads(answer) for answer in answers]
    if failed := next((each for each in read if isinstance(each, dict) and each), None):
        raise RuntimeError(f"the memory of a rank: {failed['error']}")
    return max((each for each in read if isinstance(each, int)), default=read[0])
