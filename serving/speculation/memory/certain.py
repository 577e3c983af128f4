"""Tokens of the memory in a step that verifies drawn ones: vLLM's `draft_sample_method`
"probabilistic".

    the draft drew it from q    accepted with min(1, p / q), else (p − q)+ is drawn from
    the memory's                accepted with p, else p without it: q is certain of it

vLLM keeps q of what its draft drew, row by row, and takes it for that of whatever it verifies. So
rows of requests whose tokens are the memory's are written over, by whose tokens the scheduler says
a step verifies (`osd_from_memory`). Where it says nothing, or this fails, all tokens of the step
are verified as certain ones. Answers follow the target then, too, since each token was chosen
before the target samples; a drawn one is accepted with p of it, and thus less often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from serving.speculation.memory.in_worker import scheduler_beside
from serving.vllm import parts
from serving.vllm.hooks import is_v2, to_device
from serving.vllm.schedules import draws_drafts

logger = logging.getLogger(__name__)


def verify_certain(worker: Any, off: dict[str, str]) -> Certain | None:
    """Have a worker verify tokens of the memory for what they are, and let its scheduler mix them
    with drawn ones; None where nothing is drawn, or it cannot, for which `off` has the reason."""
    scheduler = scheduler_beside(worker.vllm_config)
    if not draws_drafts(worker.vllm_config) or scheduler is None:
        return None
    kind: type[Certain] = CertainV2 if is_v2(worker.model_runner) else CertainV1
    own: parts.Part = "sampled_v2" if kind is CertainV2 else "sampled"
    if (certain := parts.start(off, "sampled", lambda: kind(worker), own)) is not None:
        scheduler.osd_begin_to_mix()
    return certain


class Certain:
    """Wraps `execute_model` of one worker, and where its runner looks up q."""

    def __init__(self, worker: Any) -> None:
        self._execute = worker.execute_model
        self._from_memory: Collection[str] | None = None
        """Of the present step; None where it is not known."""
        self.problem = ""
        """The error that ended it."""
        worker.execute_model = self.execute_model

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's."""
        self._from_memory = getattr(scheduler_output, "osd_from_memory", None)
        return self._execute(scheduler_output)

    def _guard(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; None where it is not known whose tokens a step verifies."""
        if self._from_memory is None or self.problem:
            return None
        try:
            return act()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            logger.exception("all draft tokens are verified as certain ones from now on")
            return None

    def _is_certain(self, req_ids: Iterable[str]) -> list[bool]:
        assert self._from_memory is not None
        return [req_id in self._from_memory for req_id in req_ids]


class CertainV1(Certain):
    """On the V1 runner, which gathers q of a step's tokens before it verifies them."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._runner = worker.model_runner
        self._rows = self._runner._get_spec_decode_draft_probs
        self._runner._get_spec_decode_draft_probs = self.draft_probs

    def draft_probs(self, metadata: Any) -> torch.Tensor | None:
        """As vLLM's: q [T, V] of the T draft tokens of a step; None = all are certain."""
        found: torch.Tensor | None = self._guard(lambda: self._draft_probs(metadata))
        return found

    def _draft_probs(self, metadata: Any) -> torch.Tensor | None:
        num_B = metadata.num_draft_tokens
        is_certain_B = self._is_certain(self._runner.input_batch.req_ids[: len(num_B)])
        if not any(is_certain_B):
            rows: torch.Tensor | None = self._rows(metadata)
            return rows
        pairs = zip(num_B, is_certain_B, strict=True)
        drawn_B = [0 if is_certain else num for num, is_certain in pairs]
        drawn_DV = self._rows(SimpleNamespace(num_draft_tokens=drawn_B))
        if drawn_DV is None:
            return None
        return mixed(drawn_DV, metadata.draft_token_ids, np.repeat(is_certain_B, num_B))


def mixed(drawn_DV: torch.Tensor, id_T: torch.Tensor, is_certain_T: np.ndarray) -> torch.Tensor:
    """float [T, V]: q of drawn tokens, and between these 1 for each token that is certain."""
    rows_TV = drawn_DV.new_zeros(len(id_T), drawn_DV.shape[1])
    rows_TV[to_device(np.flatnonzero(~is_certain_T), id_T.device)] = drawn_DV
    certain = to_device(np.flatnonzero(is_certain_T), id_T.device)
    rows_TV[certain, id_T[certain].long()] = 1.0
    return rows_TV


class CertainV2(Certain):
    """On the V2 runner, which keeps the draft's logits of all its requests in a table, before they
    are divided by the temperature. It is read after the draft's pass, and the next pass writes it
    anew."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        sampler = worker.model_runner.rejection_sampler
        if sampler.enable_adaptive_verification:
            raise RuntimeError("the V2 model runner shortens drafts on the device")
        self._verify = sampler._verify_in_chunks
        sampler._verify_in_chunks = self.verify

    def verify(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        *given: Any,
        **named: Any,
    ) -> Any:
        """As vLLM's `_verify_in_chunks`."""
        table = self._guard(lambda: self._written(input_batch, draft_logits, draft_sampled))
        return self._verify(logits, input_batch, table, draft_sampled, *given, **named)

    def _written(
        self, batch: Any, table_SKV: torch.Tensor | None, id_N: torch.Tensor
    ) -> torch.Tensor | None:
        num_B = batch.num_draft_tokens_per_req
        if table_SKV is None or num_B is None:
            return None
        is_certain_B = self._is_certain(batch.req_ids)
        write_certain(table_SKV, id_N, num_B, batch.idx_mapping_np, is_certain_B)
        return table_SKV


def write_certain(
    table_SKV: torch.Tensor,
    id_N: torch.Tensor,
    num_B: np.ndarray,
    slot_B: np.ndarray,
    is_certain_B: Sequence[bool],
) -> None:
    """Write rows of a table of logits, so that they are certain of a request's draft tokens.
    `id_N`: for each request, its last token and then its draft tokens; `slot_B`: its rows."""
    first_B = np.cumsum(num_B + 1) - num_B
    places = [
        (slot_B[b], step, first_B[b] + step)
        for b in np.flatnonzero(is_certain_B)
        for step in range(num_B[b])
    ]
    if not places:
        return
    slot_R, step_R, at_R = to_device(np.array(places, np.int64).T.copy(), table_SKV.device)
    table_SKV[slot_R, step_R] = never(table_SKV.dtype)
    table_SKV[slot_R, step_R, id_N[at_R].long()] = 0.0


def never(dtype: torch.dtype) -> float:
    """A logit beside 0, of which nothing is left at any temperature, and which stays finite when it
    is divided by one."""
    return max(-1e30, torch.finfo(dtype).min / 2)
