"""Whose tokens the next step verifies, request by request.

    draft tokens come ──► the memory looks up ──► the draft's, cut to what is worth verifying,
                                                  or the memory's
    what was served ────► the memory; drafts that nobody verified are judged

Where the scheduler is given the draft tokens before it schedules the next step, it changes them
(`redraft`). Where it is not, under asynchronous scheduling and with the V2 model runner, the worker
asks within its step (`propose`, `serving/speculation/memory/in_worker.py`). What was sampled since
the scheduler was last told of any is *in flight*: it is looked up, but not yet remembered. Where
the workers are other processes, they ask a memory of their own (`memory/elsewhere.py`).

The worker is told with each step (`osd_from_memory`, `osd_judged` of vLLM's output): it counts
tokens of the memory apart, and unverified drafts as if they had been verified. It is told of new
requests whose traces may warm a memory (`osd_shared`), since it does not see their `cache_salt`.
Beside drafts that are drawn the memory waits for a worker that verifies tokens of both
(`memory/certain.py`). What was served does not say whether a drawn one would have been accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from osd.records import clean_domain
from serving.capture.skips import may_be_kept
from serving.speculation.control import Settings, Speculation
from serving.speculation.memory.compiled import best
from serving.speculation.memory.memory import Memory
from serving.speculation.memory.messages import Begun
from serving.speculation.memory.unverified import Judged
from serving.speculation.requests import whole_number
from serving.speculation.step_seen import Scheduled
from serving.vllm.schedules import draws_drafts, why_left_out, why_no_none

logger = logging.getLogger(__name__)

MAX_UNTOLD = 4096
"""Judged drafts that wait for a step with which the worker is told of them."""


class Sampled(Protocol):
    """What a step sampled, on its way from the device."""

    @property
    def req_ids(self) -> Sequence[str]:
        """All requests of the step, in its order."""

    def tokens(self) -> Mapping[str, Sequence[int]]:
        """By request; none where the step ended within its prompt. Waits for the device."""


class Drafts(Protocol):
    """Draft tokens on the device, for the requests of a step in its order."""

    def row(self, b: int) -> Sequence[int]:
        """Of one request. They are read when they are asked for, in a later step."""

    def replace(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Put other tokens, maybe more of them, into some rows."""


class Proposals:
    """One per engine."""

    def __init__(self, osd: Speculation, settings: Settings) -> None:
        self._osd, self._is_by_domain = osd, settings.memory_by_domain
        self.memory_fraction = settings.memory_fraction
        """Share of the requests that are remembered beyond their end."""
        self.is_asked_by_worker = False
        """Whether the worker asks within its step."""
        self.is_left_to_worker = False
        """Whether nobody else can: what the memory finds would not be what is verified."""
        self.waits_for_worker = settings.is_drawn
        """Whether the worker would take tokens of the memory for drawn ones."""
        self._is_drawn = settings.is_drawn
        self._from_memory: set[str] = set()
        """Requests whose present draft tokens are the memory's."""
        self._known: set[str] = set()
        self._shared: set[str] = set()
        """Requests whose answers others may be proposed, whoever asks."""
        self._num_steps = 0
        self._in_flight: dict[int, Sampled | None] = {}
        """By the number of the step; None where it is not known what it sampled."""
        self._not_asked: set[int] = set()
        """Steps in flight at whose end nobody waited for what they sampled."""
        self._untold: list[Judged] = []

    def begin(self, request: Any, is_undrafted: bool) -> Begun:
        """A request has come, as vLLM's scheduler knows it. Returns what is remembered of it."""
        if request.request_id in self._known:
            self.end(request.request_id)  # another of this name, of whose end nobody has told
        self._known.add(request.request_id)
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        # What a session says later stands among its tokens as if it had been served.
        is_session = bool(getattr(request, "resumable", False))
        salt, adapter = request.cache_salt or "", adapter_of(request)
        if not salt and not adapter and not is_session:
            self._shared.add(request.request_id)
        domain = clean_domain(str(extra.get("osd_domain", "")))
        is_kept = not is_session and may_be_kept(request, extra, self.memory_fraction)
        begun = Begun(self._scope(salt, adapter, domain), is_kept)
        self._osd.begin(
            request.request_id,
            domain=domain,
            client_cap=0 if is_undrafted else whole_number(extra.get("osd_spec_k")),
            is_counted=not extra.get("osd_calibration"),
            prompt=list(request.all_token_ids),
            scope=begun.scope,
            is_kept=begun.is_kept,
        )
        return begun

    def scheduled(self, output: Any) -> frozenset[str]:
        """A step was scheduled: the worker is told whose tokens it verifies. Returns the requests
        whose tokens are the memory's."""
        self._num_steps += 1
        verified = output.scheduled_spec_decode_tokens
        from_memory = frozenset(self._from_memory & verified.keys()) if self._from_memory else ()
        self._from_memory.difference_update(output.num_scheduled_tokens)
        if self.is_asked_by_worker and output.num_scheduled_tokens:
            self._in_flight[self._num_steps] = None
        output.osd_step = self._num_steps
        output.osd_from_memory = tuple(from_memory)
        new = (request.req_id for request in output.scheduled_new_reqs)
        output.osd_shared = tuple(req_id for req_id in new if req_id in self._shared)
        output.osd_judged = [
            (one.req_id, one.step, one.num_drafted, one.num_accepted) for one in self._untold
        ]
        self._untold = []
        return frozenset(from_memory)

    def scheduled_while_held(self, output: Any) -> None:
        """A step was scheduled as vLLM does by itself. It may verify what the memory proposed
        before, of which the worker is told all the same."""
        output.osd_from_memory = tuple(
            self._from_memory & output.scheduled_spec_decode_tokens.keys()
        )
        self._from_memory.difference_update(output.num_scheduled_tokens)

    def redraft(self, req_ids: Iterable[str], drafts: list[list[int]], requests: Any) -> None:
        """Change in place what the next step verifies."""
        if self.is_asked_by_worker:  # which has changed it, and knows how much is verified
            for i, req_id in enumerate(req_ids):
                if (request := requests.get(req_id)) is not None:
                    drafts[i] = drafts[i][: len(request.spec_token_ids)]
            return
        osd = self._osd
        is_left = self.is_left_to_worker or self.waits_for_worker
        may_look_up = osd.memory is not None and not is_left
        passes = osd.present.passes
        if not may_look_up and not osd.has_caps and all(len(d) <= osd.present.k for d in drafts):
            return
        for i, req_id in enumerate(req_ids):
            # Near the end of the draft's context vLLM hands out k_max zeros, whatever k is.
            whole = drafts[i][:passes]
            if drafts[i] and (cap := osd.cap(req_id)) < len(drafts[i]):
                drafts[i] = whole[:cap]
            self._from_memory.discard(req_id)
            request = requests.get(req_id) if may_look_up else None
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            if found := osd.look_up(req_id):
                self._from_memory.add(req_id)
                drafts[i] = found
            if found or not drafts[i]:
                self._add_unverified(request, whole)

    def make_room(self, output: Any, requests: Any) -> None:
        """A step was scheduled, and so will be the next before this one has ended: how many tokens
        of each request that verifies."""
        if not self._osd.has_caps:
            return
        for req_id in output.num_scheduled_tokens:
            request, cap = requests[req_id], self._osd.cap(req_id)
            if not request.is_prefill_chunk and cap < len(request.spec_token_ids):
                request.spec_token_ids = [-1] * cap

    def verified(self, step: Scheduled, output: Any, result: Any, requests: Any) -> frozenset[str]:
        """The output of a step has come. Returns the requests whose tokens were the memory's."""
        return step.from_memory

    def propose(self, sampled: Sampled, drafts: Drafts, requests: Any) -> None:
        """As `redraft`, within the worker's step, which has just sampled: what the memory finds
        goes into the drafts, and the scheduler expects as many tokens of each request."""
        self._in_flight[self._num_steps] = sampled
        passes, rows = self._osd.present.passes, dict[int, list[int]]()
        if self._osd.may_memory_propose:
            rows = self._found_ahead(sampled, drafts, requests)
            # Before they are put there: whatever fails then, none counts as drawn that is not.
            self._from_memory.update(sampled.req_ids[b] for b in rows)
            drafts.replace(rows)
        else:
            self._not_asked.add(self._num_steps)
        for b, req_id in enumerate(sampled.req_ids):
            if b not in rows:
                self._from_memory.discard(req_id)
            request = requests.get(req_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            num = len(rows[b]) if b in rows else min(passes, self._osd.cap(req_id))
            request.spec_token_ids = [-1] * num

    def served(self, requests: Iterable[Any]) -> list[Judged]:
        """These requests have new tokens. Returns what is known since of drafts that nobody
        verified."""
        known = self._osd.requests
        if self._osd.memory is not None:
            tokens = ((request.request_id, request.all_token_ids) for request in requests)
            known.served(tokens, self._osd.may_memory_propose)
        judged, known.judged = known.judged, []
        self._untold = (self._untold + judged)[-MAX_UNTOLD:]
        return judged

    def told(self, output: Any, requests: Iterable[Any]) -> None:
        """The scheduler was told what a step sampled. Where nobody waited for it, what the memory
        would have found is noted now."""
        step = output.osd_step
        for done in [each for each in self._in_flight if each <= step]:
            del self._in_flight[done]
        if step in self._not_asked:
            self._not_asked = {each for each in self._not_asked if each > step}
            for request in requests:
                self._osd.look_up(request.request_id)

    def let_go(self) -> None:
        """What is in flight is not known."""
        if self.is_asked_by_worker:
            self._in_flight[self._num_steps] = None

    def end(self, req_id: str) -> None:
        """The request has gone."""
        for names in (self._known, self._from_memory, self._shared):
            names.discard(req_id)
        self._osd.end(req_id)

    def remember(self, answers: Iterable[tuple[list[int], list[int], str]]) -> int | None:
        """What was served before this engine started, and may be proposed to whoever asks: (end of
        the prompt, answer, domain), the oldest first. Returns how many tokens wait to be
        remembered, of which each call remembers some; None without a memory."""
        memory = self._osd.memory
        if not isinstance(memory, Memory):
            return None
        for prompt, answer, domain in answers:
            memory.remember([(prompt, answer)], self._scope("", "", domain))
        memory.work()
        return memory.num_waiting

    def forget(self) -> None:
        """Empty the memory."""
        if self._osd.memory is not None:
            self._osd.memory.clear()

    # -- inside -----------------------------------------------------------------------------------

    def _scope(self, salt: str, adapter: str, domain: str) -> str:
        """Who may be proposed what a request is served: those with its salt and its adapter, and if
        that is configured its class."""
        return scope(salt, adapter, domain if self._is_by_domain else "")

    def _found_ahead(self, sampled: Sampled, drafts: Drafts, requests: Any) -> dict[int, list[int]]:
        if None in self._in_flight.values():
            return {}
        rows, tokens = dict[int, list[int]](), sampled.tokens()
        for b, req_id in enumerate(sampled.req_ids):
            request = requests.get(req_id) if tokens.get(req_id) else None
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            ahead = self._ahead(req_id)
            if found := self._osd.look_up(req_id, ahead):
                rows[b] = found
            if self._osd.present.passes and (found or not self._osd.cap(req_id)):
                self._add_unverified(request, drafts.row(b), len(ahead))
        return rows

    def _ahead(self, req_id: str) -> list[int]:
        """Tokens of a request in flight."""
        steps = filter(None, self._in_flight.values())
        return [token for step in steps for token in step.tokens().get(req_id, ())]

    def _add_unverified(self, request: Any, draft: Sequence[int], num_ahead: int = 0) -> None:
        params = request.sampling_params
        if self._is_drawn and params is not None and params.temperature > 0:
            return
        at, num_outputs = request.num_tokens + num_ahead, request.num_output_tokens + num_ahead
        self._osd.requests.add_unverified(
            request.request_id, self._num_steps, at, num_outputs, draft
        )


def fitted(settings: Settings, config: Any, *, is_v2: bool) -> tuple[Settings, dict[str, str]]:
    """The settings for an engine with this configuration of vLLM's, and what is left out of them
    -> why."""
    left_out: dict[str, str] = {}
    settings = replace(settings, is_drawn=draws_drafts(config))
    if (reason := why_left_out(config, is_v2=is_v2)) and "memory" in settings.proposers:
        logger.warning("the memory is left out of speculation.proposers: %s", reason)
        others = tuple(p for p in settings.proposers if p != "memory")
        settings = replace(settings, proposers=others)
        left_out["memory"] = reason
    if (reason := why_no_none(config)) and settings.net_interval_seconds:
        settings = replace(settings, net_interval_seconds=0.0)
        left_out["net"] = reason
    return settings, left_out


def memory_of(settings: Settings) -> Memory | None:
    """The memory of an engine; None where it may not propose."""
    if "memory" not in settings.proposers or settings.mode == "off":
        return None
    return Memory(settings.memory_bytes, settings.memory_k_max, best(settings.is_alone))


def adapter_of(request: Any) -> str:
    """The LoRA adapter with which the target answers; "" = none."""
    lora = getattr(request, "lora_request", None)
    return "" if lora is None else str(lora.lora_name)


def scope(salt: str = "", adapter: str = "", domain: str = "") -> str:
    """A name for those who share."""
    return repr((salt, adapter, domain))
