"""The memory in the workers' processes, where these are others than the scheduler's, and draft
tokens never reach the scheduler.

    step begins ──► requests that come and go
    it samples ───► the first rank looks up ──► all ranks are told the tokens, and put the same ones
                                                in the place of the draft's
    it ends ──────► with its output the scheduler is told what was found

A scheduler that is one step ahead cannot know how much was found. It leaves room for as much as the
memory is likely to find (`elsewhere.py`), and what room is left is filled with anything. All ranks
verify the same tokens, since one of them alone says which.

Whether the ranks meet to hear them depends on nothing that may fail on one of them: a rank that
waits for another one holds up the engine. Only the first rank looks up, and after an error of its
own it still tells the others that nothing was found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from serving.speculation.control import settings_of
from serving.speculation.goodput import LEAST_SURVIVAL
from serving.speculation.memory.choice import num_better
from serving.speculation.memory.hybrid import kind_of
from serving.speculation.memory.in_worker import DraftsV1, Sampled, ask
from serving.speculation.memory.memory import Memory
from serving.speculation.memory.messages import Ask, Told
from serving.speculation.proposals import fitted, memory_of, scope
from serving.vllm.hooks import is_v2, to_device
from serving.vllm.name import resolve
from serving.vllm.names_memory import TP_GROUP
from serving.vllm.schedules import asks_in_worker, has_workers_elsewhere

logger = logging.getLogger(__name__)

Broadcast = Callable[[torch.Tensor], torch.Tensor]
"""What the first rank has, to all ranks: on the others, it is written over what is given."""


def has_ranks_to_ask(worker: Any) -> bool:
    """Whether nobody but its ranks could ask the memory in this worker's engine."""
    config = worker.vllm_config
    return asks_in_worker(config, is_v2(worker.model_runner)) and has_workers_elsewhere(config)


def ask_ranks(worker: Any) -> RankMemory | None:
    """Let this worker's model runner ask a memory of its ranks; None where nobody may."""
    config, runner = worker.vllm_config, worker.model_runner
    settings, _ = fitted(settings_of(config.additional_config), config, is_v2=is_v2(runner))
    if "memory" not in settings.proposers or settings.mode == "off":
        return None
    k = min(settings.memory_k_max, config.speculative_config.num_speculative_tokens)
    memory = memory_of(replace(settings, memory_k_max=k)) if worker.rank == 0 else None
    asked = RankMemory(worker, memory, k, resolve(TP_GROUP)().broadcast, settings.memory_by_domain)
    ask(runner, asked)
    return asked


class RankMemory:
    """One per rank. `memory`: None on all ranks but the first. `k`: most tokens of a proposal."""

    def __init__(
        self,
        worker: Any,
        memory: Memory | None,
        k: int,
        broadcast: Broadcast,
        is_by_domain: bool = False,
    ) -> None:
        self._memory, self._k, self._broadcast = memory, k, broadcast
        self._is_by_domain = is_by_domain
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        self._ask: Ask | None = None
        """Of the present step."""
        self._unread: list[Sampled | set[str]] = []
        """What was sampled, and which requests ended behind it, that the memory does not know of
        yet."""
        self._found: dict[str, int] = {}
        """Tokens by request, at the end of the newest step."""
        self._replaced: dict[str, Sequence[int]] = {}
        """Drafts from the end of the newest step, which nobody will verify."""
        self._unverified: dict[str, Sequence[int]] = {}
        """The same, of the step before."""
        self._known: set[str] = set()
        """Requests."""
        self._is_led = False
        """Whether the scheduler says in this step what comes and goes."""
        self._has_passes = True
        """Whether the draft ran at the end of the step before."""
        self.is_begun = False
        self.problem = ""
        """The error that ended it."""
        worker.execute_model, worker.sample_tokens = self.execute_model, self.sample_tokens

    # -- vLLM's methods ---------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's."""
        self._ask = getattr(scheduler_output, "osd_ask", None)
        self._osd_guard(lambda: self._begin_step(scheduler_output))
        return self._execute(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's. Its output tells the scheduler what was found."""
        result = self._sample(grammar_output)
        if self._memory is not None and self.is_begun and result is not None:
            unverified = self._osd_guard(self._read_unverified) or {}
            # An output that is still on its way from the device holds the one that is sent.
            output = getattr(result, "_model_runner_output", result)
            output = getattr(output, "model_runner_output", output)
            output.osd_told = Told(dict(self._found), unverified, self.problem)
        return result

    # -- from the model runner (`in_worker.py`) ---------------------------------------------------

    def osd_propose(self, sampled: Sampled | None, drafts: DraftsV1) -> None:
        """Within the step, which has sampled and drafted."""
        if self._is_led and sampled is not None:
            self._unread.append(sampled)
        if self._ask is None:
            return
        ask, num = self._ask, len(drafts.tokens)
        packed_BW = np.zeros((num, 1 + self._k), np.int32)
        if self._memory is not None and sampled is not None:
            self._osd_guard(lambda: self._look_up(ask, sampled, drafts, packed_BW))
            if self.problem:
                packed_BW[:] = 0
        drafts.put(self._broadcast(to_device(packed_BW, drafts.tokens.device)))

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        if self.problem:
            return None
        try:
            return act()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            self._found, self._replaced, self._unread = {}, {}, []
            logger.exception("the memory has ended in this rank; serving is not affected")
            return None

    # -- from the scheduler's process -------------------------------------------------------------

    def begin(self) -> None:
        """All ranks are ready: the scheduler is told, and may ask."""
        self.is_begun = True

    def forget(self) -> None:
        """Empty the memory, of what it does not know yet as well."""
        if self._memory is not None:
            self._read(len(self._unread))
            self._memory.clear()

    def remember(self, answers: Iterable[tuple[Sequence[int], Sequence[int], str]]) -> int:
        """As `Proposals.remember`."""
        if self._memory is None:
            return 0
        for prompt, answer, domain in answers:
            shared = scope(domain=domain if self._is_by_domain else "")
            self._memory.remember([(prompt, answer)], shared)
        self._memory.work()
        return self._memory.num_waiting

    # -- inside -----------------------------------------------------------------------------------

    def _begin_step(self, output: Any) -> None:
        if self._memory is None:
            return None
        if output.num_scheduled_tokens:
            verified = output.scheduled_spec_decode_tokens.keys()
            found = self._found.keys() & verified if self._has_passes else verified
            output.osd_from_memory = tuple(found)
            self._has_passes = self._ask is None or self._ask.plan.passes > 0
            self._unverified, self._replaced, self._found = self._replaced, {}, {}
        self._is_led = hasattr(output, "osd_begun")
        if not self._is_led:
            return self._let_go()
        if output.finished_req_ids:
            self._unread.append(set(output.finished_req_ids))
        # The newest may still be on its way. Where nothing runs, there is nothing to wait for.
        self._read(self._newest if output.num_scheduled_tokens else len(self._unread))
        if not output.num_scheduled_tokens:
            self._memory.work()  # there may be no other step for long
        for req_id, tokens in begun(output):
            for one in self._unread:  # of another one of this name, or of before it was preempted
                one.discard(req_id)
            self._memory.end(req_id)  # what it was served before it was preempted may be no more
            terms = output.osd_begun[req_id]
            self._memory.begin(req_id, tokens, scope=terms.scope, is_kept=terms.is_kept)
            self._known.add(req_id)
        return None

    def _let_go(self) -> None:
        """The engine goes on by itself: of what it does then, nothing will be known."""
        if self._known or self._unread:
            self._unread = [self._known]
            self._read(1)

    @property
    def _newest(self) -> int:
        """Where what was sampled last stands among what is unread."""
        places = (i for i, one in enumerate(self._unread) if isinstance(one, Sampled))
        return max(places, default=len(self._unread))

    def _look_up(self, ask: Ask, newest: Sampled, drafts: DraftsV1, packed_BW: np.ndarray) -> None:
        """Write into each row of [B, 1 + k] how many tokens were found, and these."""
        assert self._memory is not None
        self._read(len(self._unread) - 1)
        self._unread.clear()
        self._memory.advance_all(list(newest.tokens().items()), self._k, LEAST_SURVIVAL)
        self._memory.work()
        for b, req_id in enumerate(newest.req_ids):
            if not newest.tokens().get(req_id) or (terms := ask.terms.get(req_id)) is None:
                continue
            found = self._memory.propose(req_id, self._k, LEAST_SURVIVAL)
            expected = float(found.survival_K.sum())
            ratio = ask.ratios[int(kind_of(np.array(expected)))]
            num = num_better(found, ask.plan, terms, ratio)
            if num:
                packed_BW[b, 0], packed_BW[b, 1 : num + 1] = num, found.tokens[:num]
                self._found[req_id] = num
            if ask.plan.passes and (num or not terms.cap):
                self._replaced[req_id] = drafts.row(b)

    def _read(self, num: int) -> None:
        """Have the memory know of the first of what is unread."""
        assert self._memory is not None
        for one in self._unread[:num]:
            if isinstance(one, Sampled):
                self._memory.advance_all(list(one.tokens().items()))
                self._memory.work()
            else:
                self._known = self._known - one
                for req_id in one:
                    self._memory.end(req_id)
        del self._unread[:num]

    def _read_unverified(self) -> dict[str, list[int]]:
        return {req_id: list(row) for req_id, row in self._unverified.items()}


def begun(output: Any) -> list[tuple[str, Sequence[int]]]:
    """Requests that begin in a step, or go on after they were preempted, with all their tokens."""
    new = [
        (new.req_id, new.prefill_token_ids or new.prompt_token_ids or ())
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    resumed = [
        (req_id, cached.all_token_ids[req_id])
        for req_id in cached.resumed_req_ids
        if req_id in cached.all_token_ids
    ]
    return [(req_id, tokens) for req_id, tokens in new + resumed if req_id in output.osd_begun]
