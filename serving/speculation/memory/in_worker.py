"""The memory is asked within the worker's step, where draft tokens never reach the scheduler.

    target samples ──► its tokens begin their way to the host
    draft runs ──────► (meanwhile)
    tokens are there ► the scheduler's own `Proposals` look up, in this process and thread
                   ──► rows of the draft tokens are replaced on the device, and the scheduler
                       expects as many tokens of each request as were found

The host waits for what the target sampled in each step that may verify what the memory finds; the
draft runs meanwhile. In other steps it waits for nothing. Here worker and scheduler are one
process: so it is with one rank, unless another executor is asked for. Where they are not, the
memory is in the worker's process (`ranks.py`), which asks it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import torch

from serving.speculation.scheduler import IN_THIS_PROCESS, Controlled
from serving.vllm.hooks import is_v2, to_device


class Asked(Protocol):
    """Who is asked: a scheduler, or a rank's memory."""

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; None after an error, which ends the asking."""

    def osd_propose(self, sampled: Sampled | None, drafts: DraftsV1) -> None:
        """Change the drafts of a step. `sampled`: what it sampled; None where that failed."""


def ask(runner: Any, asked: Asked) -> AskV1 | AskV2:
    """Let this model runner ask within its steps."""
    return AskV2(runner, asked) if is_v2(runner) else AskV1(runner, asked)


def ask_in_worker(config: Any, runner: Any) -> AskV1 | AskV2 | None:
    """Let the model runner of an engine with this configuration of vLLM's ask the memory; None
    where the scheduler asks, or nobody."""
    scheduler = scheduler_beside(config)
    if scheduler is None or not scheduler.is_asked_by_worker:
        return None
    asking = ask(runner, scheduler)
    scheduler.osd_begin_to_ask()
    return asking


def scheduler_beside(config: Any) -> Controlled | None:
    """The scheduler of an engine with this configuration of vLLM's, where it is in this process."""
    return next((each for each in IN_THIS_PROCESS if each.vllm_config is config), None)  # type: ignore[attr-defined]


class AskV1:
    """Wraps `propose_draft_token_ids` of a V1 model runner, whatever wrapped it before."""

    def __init__(self, runner: Any, asked: Asked) -> None:
        self._runner, self._asked = runner, asked
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self.propose

    def propose(self, scheduler_output: Any, sampled: Any, *given: Any, **named: Any) -> Any:
        """As vLLM's. Returns draft tokens [B, longest row]."""
        on_its_way = self._asked._osd_guard(lambda: self._sampled(sampled))
        drafts = self._propose(scheduler_output, sampled, *given, **named)
        if not isinstance(drafts, torch.Tensor):
            return drafts
        changed = DraftsV1(drafts)
        self._asked.osd_propose(on_its_way, changed)
        return changed.tokens

    def _sampled(self, sampled: torch.Tensor) -> Sampled:
        batch = self._runner.input_batch
        is_partial = self._runner.discard_request_mask.np[: batch.num_reqs].copy()
        return Sampled(batch.req_ids[: batch.num_reqs], sampled, is_partial)


class AskV2:
    """Wraps `postprocess_sampled` of a V2 model runner, and `set_draft_tokens` of its handler of
    draft tokens."""

    def __init__(self, runner: Any, asked: Asked) -> None:
        self._runner, self._asked = runner, asked
        self._postprocess = runner.postprocess_sampled
        self._set = runner.draft_tokens_handler.set_draft_tokens
        self._copy: HostCopy | None = None
        runner.postprocess_sampled = self.postprocess
        runner.draft_tokens_handler.set_draft_tokens = self.set_draft_tokens

    def postprocess(
        self, idx: Any, sampled: torch.Tensor, num_sampled: torch.Tensor, *given: Any, **named: Any
    ) -> None:
        """As vLLM's."""
        self._copy = self._asked._osd_guard(lambda: HostCopy(emitted(sampled, num_sampled)))
        self._postprocess(idx, sampled, num_sampled, *given, **named)

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """As vLLM's, which is told of [B, longest row]."""
        copy, self._copy = self._copy, None
        sampled = None if copy is None else Sampled(input_batch.req_ids, copy)
        table = self._runner.req_states.draft_tokens
        changed = DraftsV2(draft_tokens, table, input_batch.idx_mapping_np)
        self._asked.osd_propose(sampled, changed)
        draft_tokens = changed.tokens
        self._set(input_batch, draft_tokens)


def emitted(sampled_BG: torch.Tensor, num_B: torch.Tensor) -> torch.Tensor:
    """[B, G + 1]: −1 behind the tokens that count, where vLLM leaves what was there before."""
    offset_G = torch.arange(sampled_BG.shape[1], device=sampled_BG.device)
    return torch.where(offset_G < num_B[:, None], sampled_BG, -1)


class HostCopy:
    """A copy on the host, for which nobody waits before it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._rows: list[list[int]] | None = None
        if tensor.device.type != "cuda":
            self._tensor = tensor.to("cpu", copy=True)
            return
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def rows(self) -> list[list[int]]:
        """Waits for the device when it is first called."""
        if self._rows is None:
            if self._done is not None:
                self._done.synchronize()
            self._rows = self._tensor.tolist()
        return self._rows


class Sampled:
    """What a step sampled: [B, G + 1], −1 behind a request's last token."""

    def __init__(
        self,
        req_ids: Sequence[str],
        sampled: torch.Tensor | HostCopy,
        is_partial_B: np.ndarray | None = None,
    ) -> None:
        self.req_ids = list(req_ids)
        self._copy = sampled if isinstance(sampled, HostCopy) else HostCopy(sampled)
        self._is_partial_B = is_partial_B
        self._tokens: dict[str, list[int]] | None = None
        self._discarded: set[str] = set()

    def discard(self, req_id: str) -> None:
        """Leave out what was sampled for a request, before any of it is read."""
        self._discarded.add(req_id)

    def tokens(self) -> Mapping[str, Sequence[int]]:
        """By request. A step that ended within the prompt of one sampled nothing for it."""
        if self._tokens is None:
            self._tokens = {
                req_id: [token for token in row if token >= 0]
                for b, (req_id, row) in enumerate(zip(self.req_ids, self._copy.rows(), strict=True))
                if req_id not in self._discarded
                and (self._is_partial_B is None or not self._is_partial_B[b])
            }
        return self._tokens


class DraftsV1:
    """Draft tokens of a V1 runner's step."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self.tokens = drafts
        self._drafted = drafts
        self._copy: HostCopy | None = None

    def row(self, b: int) -> Sequence[int]:
        """The draft's tokens for one request."""
        if self._copy is None:
            self._copy = HostCopy(self._drafted)
        return Row(self._copy, b, int(self._drafted.shape[1]))

    def replace(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Put other tokens into some rows, which get longer where needed."""
        if not rows:
            return
        rows_R, new_RW = padded(rows, self.tokens)
        self.tokens = self._widened(new_RW.shape[1])
        self.tokens[rows_R, : new_RW.shape[1]] = new_RW

    def put(self, packed_BW: torch.Tensor) -> None:
        """Put other tokens into all rows, which get as long: int [B, 1 + W], how many of the tokens
        behind it each row gets. The host does not wait for them."""
        self.tokens = self._widened(packed_BW.shape[1] - 1)
        overwrite(self.tokens, packed_BW)

    def _widened(self, width: int) -> torch.Tensor:
        """The draft's tokens [B, at least `width`], with zeros behind them."""
        num, k = self._drafted.shape
        tokens = self._drafted.new_zeros(num, max(k, width))
        tokens[:, :k] = self._drafted
        return tokens


class DraftsV2(DraftsV1):
    """Draft tokens of a V2 runner's step. The runner reads them from a table of all its
    requests."""

    def __init__(self, drafts: torch.Tensor, table: torch.Tensor, index_B: np.ndarray) -> None:
        super().__init__(drafts)
        self._table, self._index_B = table, index_B

    def replace(self, rows: Mapping[int, Sequence[int]]) -> None:
        """As above, and in the table."""
        super().replace(rows)
        if rows:
            at = {int(self._index_B[b]): tokens for b, tokens in rows.items()}
            index_R, new_RW = padded(at, self._table)
            self._table[index_R, : new_RW.shape[1]] = new_RW

    def put(self, packed_BW: torch.Tensor) -> None:
        """As above, and in the table, where −1 stands behind the draft's tokens."""
        super().put(packed_BW)
        index_B = to_device(np.asarray(self._index_B, np.int64), self._table.device)
        rows_BG = self._table[index_B].clamp(min=0)
        overwrite(rows_BG, packed_BW)
        self._table[index_B] = rows_BG


def overwrite(rows_BG: torch.Tensor, packed_BW: torch.Tensor) -> None:
    """Write over the beginning of each row as many tokens as `packed_BW` begins with."""
    num_B1, found_BW = packed_BW[:, :1], packed_BW[:, 1:].to(rows_BG.dtype)
    width = found_BW.shape[1]
    is_found_BW = torch.arange(width, device=rows_BG.device) < num_B1
    rows_BG[:, :width] = torch.where(is_found_BW, found_BW, rows_BG[:, :width])


class Row(Sequence[int]):
    """Some tokens of a copy, read when one of them is asked for."""

    def __init__(self, copy: HostCopy, b: int, length: int) -> None:
        self._copy, self._b, self._length = copy, b, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._copy.rows()[self._b][: self._length][index]


def padded(
    rows: Mapping[int, Sequence[int]], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [R], [R, W]): which rows, and their tokens with zeros behind them, on the device."""
    new_RW = np.zeros((len(rows), max(map(len, rows.values()))), np.int64)
    for r, tokens in enumerate(rows.values()):
        new_RW[r, : len(tokens)] = tokens
    index_R = np.fromiter(rows, np.int64, len(rows))
    return to_device(index_R, like.device), to_device(new_RW, like.device).to(like.dtype)
