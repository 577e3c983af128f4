"""Which rows of a step are kept, and how they reach the capture thread without the engine waiting.

Rows of rejected draft tokens are always kept, accepted and plain ones with a probability that the
row carries along. The sampled tokens show which row is of which kind.

On a CPU they can be read at once. Exactly the rows that are kept are copied, and the capture thread
takes their top-k. A small step is copied whole, since choosing rows would take the engine longer.

On a device, reading them would make the engine wait. Instead, rows are chosen that may be kept: the
last row of each request, whose index is computed on the device, and rows drawn by lot beforehand.
Their top-k is taken on the device and copied to pinned memory. The capture thread waits for the
copy, reads the sampled tokens and discards the rows that are not kept.

Both ways keep the same rows for the same draw. The device's way is tested on CPU and `meta`
tensors; `scripts/gpu` compares what comes from a GPU with the target.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from osd.records import PLAIN
from serving.capture.rows import Logits, RowPool, Rows, TopK, kinds_of, summarise_rows
from serving.vllm.hooks import Verification, to_device

MAX_BYTES_TO_COPY = 1 << 20
"""Size of a step's logits up to which copying all of them is quicker than choosing rows."""


@dataclass(slots=True, frozen=True)
class Lot:
    """Whose rows may be kept, and how often."""

    captured_B: np.ndarray
    chance_BG: np.ndarray
    """uniform in [0, 1), one for each token the step may emit; a row is kept when this lies below
    its probability"""
    keep_prob: np.ndarray
    """by kind: REJECTED, ACCEPTED, PLAIN"""
    top_k: int


@dataclass(slots=True)
class Landed:
    """A step's tokens and rows on the host."""

    position_B: np.ndarray
    sampled_BG: np.ndarray
    """-1 after the last emitted token, and everywhere in an unfinished prefill"""
    rows: Rows | None


class Picked(Protocol):
    """A step's tokens and rows, possibly still on their way to the host."""

    def land(self) -> Landed: ...
    @property
    def nbytes(self) -> int: ...


def pick(step: Verification, lot: Lot, pool: RowPool) -> Picked:
    """Pick in the way that fits the device and the size of the logits."""
    if step.logits.device.type != "cpu":
        return pick_on_device(step, lot)
    is_small = step.logits.nbytes <= MAX_BYTES_TO_COPY and lot.captured_B.any()
    return pick_later(step, lot) if is_small else pick_on_host(step, lot, pool)


# -------------------------------------------------------------------------------------- on the host


@dataclass(slots=True, frozen=True)
class _OnHost:
    """Rows chosen in the engine's thread; `land` does the rest in the capture thread."""

    position_B: np.ndarray
    sampled_BG: np.ndarray
    kind_BG: np.ndarray
    request_R: np.ndarray
    offset_R: np.ndarray
    num_drafts_B: np.ndarray
    draft_ids: np.ndarray
    lot: Lot
    scores: Logits | None

    def land(self) -> Landed:
        landed = Landed(self.position_B, self.sampled_BG, None)
        if self.scores is not None:
            where = self.request_R, self.offset_R
            landed.rows = _rows(
                *where, self.kind_BG, self.num_drafts_B, self.draft_ids, self.lot, self.scores
            )
        return landed

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes if self.scores is not None else 0


def pick_on_host(step: Verification, lot: Lot, pool: RowPool | None = None) -> Picked:
    """Read the sampled tokens, and copy the rows that are kept into memory of the pool."""
    sampled_BG = step.sampled_BG.numpy().copy()
    sampled_BG[step.is_partial_B] = -1
    num_drafts_B = step.num_draft_tokens_B
    kind_BG = kinds_of(sampled_BG, num_drafts_B)
    request_R, offset_R = np.nonzero(_is_kept(kind_BG, lot))
    scores = None
    if len(request_R):
        index_R = torch.from_numpy(_first_row(num_drafts_B)[request_R] + offset_R)
        scores = (
            pool.copy(step.logits, index_R) if pool is not None else Logits(step.logits[index_R])
        )
    return _OnHost(
        position_B=step.first_position_B.numpy().copy(),
        sampled_BG=sampled_BG,
        kind_BG=kind_BG,
        request_R=request_R,
        offset_R=offset_R,
        num_drafts_B=num_drafts_B,
        draft_ids=step.draft_ids.numpy().copy(),
        lot=lot,
        scores=scores,
    )


@dataclass(slots=True, frozen=True)
class _Later:
    step: Verification
    lot: Lot

    def land(self) -> Landed:
        return pick_on_host(self.step, self.lot).land()

    @property
    def nbytes(self) -> int:
        return self.step.logits.nbytes


def pick_later(step: Verification, lot: Lot) -> Picked:
    """Copy the whole step, and choose its rows when it is landed."""
    copied = replace(
        step,
        draft_ids=step.draft_ids.clone(),
        first_position_B=step.first_position_B.clone(),
        sampled_BG=step.sampled_BG.clone(),
        logits=step.logits.clone(),
    )
    return _Later(copied, lot)


# ------------------------------------------------------------------------------------ on the device


@dataclass(slots=True)
class _FromDevice:
    is_partial_B: np.ndarray
    num_drafts_B: np.ndarray
    lot: Lot
    last_R: np.ndarray
    """requests whose last row comes first among the rows"""
    request_R: np.ndarray
    offset_R: np.ndarray
    """rows drawn by lot, which come after these"""
    transfer: Transfer

    def land(self) -> Landed:
        sampled_BG, position_B, draft_ids, *top = self.transfer.wait()
        sampled_BG[self.is_partial_B] = -1
        landed = Landed(position_B, sampled_BG, None)
        if not top:
            return landed
        kind_BG = kinds_of(sampled_BG, self.num_drafts_B)
        offset_of_last_R = (sampled_BG >= 0).sum(1)[self.last_R] - 1
        request_R = np.concatenate([self.last_R, self.request_R])
        offset_R = np.concatenate([offset_of_last_R, self.offset_R])
        is_last_R = np.arange(len(request_R)) < len(self.last_R)
        is_kept_R = (offset_R >= 0) & _is_kept(kind_BG, self.lot)[request_R, offset_R]
        # A request's last row may have been drawn by lot as well, and must not come twice.
        is_kept_R[~is_last_R] &= self.offset_R != (sampled_BG >= 0).sum(1)[self.request_R] - 1
        order_R = np.lexsort((offset_R, request_R))
        order_R = order_R[is_kept_R[order_R]]
        if len(order_R):
            scores = TopK(*top).of(order_R)
            where = request_R[order_R], offset_R[order_R]
            landed.rows = _rows(*where, kind_BG, self.num_drafts_B, draft_ids, self.lot, scores)
        return landed

    @property
    def nbytes(self) -> int:
        return self.transfer.nbytes


def pick_on_device(step: Verification, lot: Lot) -> Picked:
    """Queue work on the device and copies to the host, without waiting."""
    wanted_B, num_drafts_B = lot.captured_B & ~step.is_partial_B, step.num_draft_tokens_B
    last_R = np.nonzero(wanted_B)[0]
    is_drawn_BG = lot.chance_BG < lot.keep_prob[1:].max()
    is_drawn_BG &= np.arange(lot.chance_BG.shape[1]) <= num_drafts_B[:, None]
    request_R, offset_R = np.nonzero(is_drawn_BG & wanted_B[:, None])
    tensors = [step.sampled_BG, step.first_position_B, step.draft_ids]
    if len(last_R):
        first_row_B = _first_row(num_drafts_B)
        index = np.concatenate([first_row_B[request_R] + offset_R, first_row_B[last_R], last_R])
        drawn_R, first_R, at_R = to_device(index, step.logits.device).tensor_split(
            (len(request_R), len(request_R) + len(last_R))
        )
        num_emitted_R = (step.sampled_BG >= 0).sum(1)[at_R]
        row_R = torch.cat([first_R + (num_emitted_R - 1).clamp(min=0), drawn_R])
        tensors += summarise_rows(step.logits, row_R, lot.top_k)
    return _FromDevice(
        step.is_partial_B, num_drafts_B, lot, last_R, request_R, offset_R, Transfer(tensors)
    )


class Transfer:
    """Tensors on their way to the host, in one copy: each has its price in the engine's thread. It
    is queued behind the work that makes the tensors, so their memory may be used again at once.
    Only `wait` blocks."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._likes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)  # aligned
        self._host = packed = torch.cat([_bytes_of(tensors[i]) for i in self._order])
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """The tensors, in their order."""
        if self._event is not None:
            self._event.synchronize()
        found, at = dict[int, np.ndarray](), 0
        for i in self._order:
            shape, dtype = self._likes[i]
            end = at + shape.numel() * dtype.itemsize
            found[i] = self._host[at:end].view(dtype).reshape(shape).numpy()
            at = end
        return [found[i] for i in range(len(found))]

    @property
    def nbytes(self) -> int:
        return self._host.nbytes


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes], uint8. A tensor of one element may have a stride of 0, which `view` refuses."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# --------------------------------------------------------------------------------------------- both


def _is_kept(kind_BG: np.ndarray, lot: Lot) -> np.ndarray:
    return lot.captured_B[:, None] & (kind_BG >= 0) & (lot.chance_BG < lot.keep_prob[kind_BG])


def _first_row(num_drafts_B: np.ndarray) -> np.ndarray:
    """[B]: index of each request's first row in the step's logits."""
    return np.cumsum(num_drafts_B + 1) - (num_drafts_B + 1)


def _rows(
    request_R: np.ndarray,
    offset_R: np.ndarray,
    kind_BG: np.ndarray,
    num_drafts_B: np.ndarray,
    draft_ids: np.ndarray,
    lot: Lot,
    scores: Logits | TopK,
) -> Rows:
    kind_R = kind_BG[request_R, offset_R]
    first_draft_B = np.cumsum(num_drafts_B) - num_drafts_B
    draft_id_R = np.full(len(kind_R), -1, np.int64)
    is_proposed_R = kind_R != PLAIN
    draft_id_R[is_proposed_R] = draft_ids[(first_draft_B[request_R] + offset_R)[is_proposed_R]]
    return Rows(request_R, offset_R, kind_R, draft_id_R, lot.keep_prob[kind_R], scores)
