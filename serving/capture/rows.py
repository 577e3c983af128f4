"""Rows of target logits, and their top-k.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from osd.records import ACCEPTED, PLAIN, REJECTED

BLOCK = 128
"""Tokens of a vocabulary that are first represented by their largest logit."""
MAX_ELEMENTS = 1 << 18
"""Most logits of several steps that are summarised together. They are copied for it, which only
pays for few."""
ROWS_AT_ONCE = 16
"""Memory for copied rows is allocated for a multiple of this, since steps differ a little."""
MAX_POOLED_BYTES = 128 << 20
"""Unused memory for copied rows that is kept."""


@dataclass(slots=True, frozen=True)
class TopK:
    """What is kept of the target's distribution: the K most likely tokens, and the mass of the
    rest."""

    ids_RK: np.ndarray
    """int32, most likely first"""
    logprobs_RK: np.ndarray
    """float16, raw log-softmax"""
    tail_R: np.ndarray
    """float32, log of the mass outside the K"""

    def of(self, index_R: np.ndarray) -> TopK:
        """Some of the rows, copied."""
        return TopK(self.ids_RK[index_R], self.logprobs_RK[index_R], self.tail_R[index_R])

    def give_back(self) -> None:
        """Does nothing: unlike those of `Logits`, these arrays come from no pool."""

    @property
    def nbytes(self) -> int:
        return self.ids_RK.nbytes + self.logprobs_RK.nbytes + self.tail_R.nbytes


@dataclass(slots=True, frozen=True)
class Logits:
    """Rows whose top-k has not been taken yet. On a CPU the capture thread takes it."""

    logits_RV: torch.Tensor
    give_back: Callable[[], None] = lambda: None
    """Let their memory be used again."""
    num_held_bytes: int = 0
    """Size of the memory they are a part of; 0 = they are all of it."""

    def of(self, index_R: np.ndarray) -> Logits:
        """Some of the rows, copied."""
        return Logits(self.logits_RV[torch.from_numpy(index_R)])

    @property
    def nbytes(self) -> int:
        return self.num_held_bytes or self.logits_RV.nbytes


class RowPool:
    """Copies rows into memory that is used again. In fresh memory, every new page would interrupt
    the engine."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def copy(self, logits: torch.Tensor, index_R: torch.Tensor) -> Logits:
        """Copy some rows of logits on a CPU."""
        num_rows, size = len(index_R), logits.shape[1]
        buffer = self._free.pop() if self._free else None
        if (
            buffer is None
            or len(buffer) < num_rows
            or buffer.shape[1] != size
            or buffer.dtype != logits.dtype
        ):
            buffer = torch.empty(
                (-(-num_rows // ROWS_AT_ONCE) * ROWS_AT_ONCE, size), dtype=logits.dtype
            )
        rows = buffer[:num_rows]
        torch.index_select(logits, 0, index_R, out=rows)
        return Logits(rows, partial(self._take_back, buffer), buffer.nbytes)

    def _take_back(self, buffer: torch.Tensor) -> None:
        if sum(kept.nbytes for kept in self._free) + buffer.nbytes <= MAX_POOLED_BYTES:
            self._free.append(buffer)


@dataclass(slots=True)
class Rows:
    """Rows kept from one step, ordered by request and then by offset."""

    request_R: np.ndarray
    """index into the step's requests"""
    offset_R: np.ndarray
    """draft tokens accepted before this row"""
    kind_R: np.ndarray
    draft_id_R: np.ndarray
    keep_prob_R: np.ndarray
    scores: Logits | TopK


def top_of(scores: Sequence[Logits | TopK], top_k: int) -> TopK:
    """The top-k of the rows of several steps, in their order. Small steps are handled together. The
    logits are gone afterwards."""
    found: list[TopK] = []
    waiting: list[torch.Tensor] = []

    def settle() -> None:
        if waiting:
            rows = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
            found.append(TopK(*(part.numpy() for part in summarise(rows, top_k))))
            waiting.clear()

    for one in scores:
        if isinstance(one, TopK):
            settle()
            found.append(one)
            continue
        if sum(rows.numel() for rows in waiting) + one.logits_RV.numel() > MAX_ELEMENTS:
            settle()
        waiting.append(one.logits_RV)
    settle()
    for one in scores:
        if isinstance(one, Logits):
            one.give_back()
    return TopK(
        np.concatenate([top.ids_RK for top in found]),
        np.concatenate([top.logprobs_RK for top in found]),
        np.concatenate([top.tail_R for top in found]),
    )


@torch.inference_mode()
def summarise(
    logits_RV: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-k of the raw log-softmax, most likely first, and the log of the other mass, on the device
    of the logits: int32 [R, K], float16 [R, K], float32 [R]. May overwrite the logits."""
    top_k = min(top_k, logits_RV.shape[-1])
    if logits_RV.device.type == "cpu":
        return summarise_on_cpu(logits_RV.float(), top_k)
    return summarise_in_few_kernels(logits_RV, top_k)


def summarise_on_cpu(
    logits_RV: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each logit is exponentiated only once, which is most of the cost over a large vocabulary."""
    values_RK, ids_RK = _topk(logits_RV, top_k)
    mass_RV = logits_RV.sub_(values_RK[:, :1]).exp_()
    log_mass_R = mass_RV.sum(-1).log()
    tail_R = mass_RV.scatter_(-1, ids_RK, 0.0).sum(-1).log() - log_mass_R
    logprobs_RK = values_RK - values_RK[:, :1] - log_mass_R[:, None]
    return ids_RK.to(torch.int32), logprobs_RK.to(torch.float16), tail_R


def summarise_in_few_kernels(
    logits_RV: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a device, where the engine's thread pays for every launch."""
    logprobs_RV = logits_RV.log_softmax(-1, dtype=torch.float32)
    logprobs_RK, ids_RK = logprobs_RV.topk(top_k, dim=-1)
    tail_R = logprobs_RV.scatter_(-1, ids_RK, -torch.inf).exp_().sum(-1).log_()
    return ids_RK.to(torch.int32), logprobs_RK.to(torch.float16), tail_R


def _topk(logits_RV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.topk` over the last dimension, on a CPU. For a large vocabulary one quick pass first
    finds the k blocks with the largest maxima: they hold the top-k."""
    num_rows, size = logits_RV.shape
    num_blocks = size // BLOCK
    if num_blocks < 4 * top_k:
        return logits_RV.topk(top_k, dim=-1)
    in_blocks = logits_RV[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK))
    block_RK = in_blocks.amax(-1).topk(top_k, dim=-1, sorted=False).indices
    candidates = in_blocks.gather(1, block_RK[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    ids = (block_RK[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    if num_blocks * BLOCK < size:  # the end of the vocabulary is no whole block
        rest = torch.arange(num_blocks * BLOCK, size)
        candidates = torch.cat([candidates, logits_RV[:, rest]], 1)
        ids = torch.cat([ids, rest.expand(num_rows, -1)], 1)
    values_RK, at_RK = candidates.topk(top_k, dim=-1)
    return values_RK, ids.gather(1, at_RK)


def summarise_rows(
    logits: torch.Tensor, row_R: torch.Tensor, top_k: int, max_elements: int = 1 << 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`summarise` of some rows of the logits, which stay as they are. It copies at most
    `max_elements` floats at a time, since the engine has taken most of the memory."""
    parts = row_R.split(max(1, max_elements // logits.shape[-1]))
    if len(parts) == 1:
        return summarise(logits[row_R], top_k)
    ids, logprobs, tails = zip(*(summarise(logits[rows], top_k) for rows in parts), strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(tails)


def kinds_of(sampled_BG: np.ndarray, num_drafts_B: np.ndarray) -> np.ndarray:
    """[B, G + 1]: REJECTED, ACCEPTED or PLAIN for each emitted token, -1 elsewhere.

    All emitted tokens of a request but the last are accepted draft tokens. The last one replaces a
    rejected draft token, or follows the last draft token, where nothing was proposed.
    """
    num_emitted_B1 = (sampled_BG >= 0).sum(1, keepdims=True)
    offset_G = np.arange(sampled_BG.shape[1])
    last = np.where(num_emitted_B1 - 1 < num_drafts_B[:, None], REJECTED, PLAIN)
    kind_BG = np.where(offset_G < num_emitted_B1 - 1, ACCEPTED, last)
    return np.where(offset_G < num_emitted_B1, kind_BG, -1).astype(np.int8)
