"""Rows of target logits, and their top-k.

Legend: B requests in a step, G draft tokens per step, V vocabulary, K top-k, R rows kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from osd.records import ACCEPTED, PLAIN, REJECTED


@dataclass(slots=True, frozen=True)
class TopK:
    """What is kept of the target's distribution: the K most likely tokens, and the mass of all others."""

    ids_RK: np.ndarray
    """int32, most likely first"""
    logprobs_RK: np.ndarray
    """float16, raw log-softmax"""
    tail_R: np.ndarray
    """float32, log of the mass outside the K"""

    def top(self, index_R: np.ndarray, top_k: int) -> TopK:
        return TopK(self.ids_RK[index_R], self.logprobs_RK[index_R], self.tail_R[index_R])

    @property
    def nbytes(self) -> int:
        return self.ids_RK.nbytes + self.logprobs_RK.nbytes + self.tail_R.nbytes


@dataclass(slots=True, frozen=True)
class Logits:
    """Rows whose top-k has not been taken yet: on a CPU that is left to the capture thread."""

    logits_RV: torch.Tensor

    def top(self, index_R: np.ndarray, top_k: int) -> TopK:
        ids_RK, logprobs_RK, tail_R = summarise(self.logits_RV[torch.from_numpy(index_R)], top_k)
        return TopK(ids_RK.numpy(), logprobs_RK.numpy(), tail_R.numpy())

    @property
    def nbytes(self) -> int:
        return self.logits_RV.nbytes


@dataclass(slots=True)
class Rows:
    """Rows kept from one step, before they are joined to their requests; ordered by request, then by offset."""

    request_R: np.ndarray
    """index into the step's requests"""
    offset_R: np.ndarray
    """draft tokens accepted before this row"""
    kind_R: np.ndarray
    draft_id_R: np.ndarray
    keep_prob_R: np.ndarray
    scores: Logits | TopK


@torch.inference_mode()
def summarise(logits_RV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-k of the raw log-softmax, most likely first, and the log of all other mass, on the device of the logits:
    int32 [R, K], float16 [R, K], float32 [R]. Works in place: give it rows that nobody else needs."""
    logits_RV = logits_RV.float()
    top_k = min(top_k, logits_RV.shape[-1])
    values_RK, ids_RK = logits_RV.topk(top_k, dim=-1)
    # Each logit is exponentiated once: over a large vocabulary that is most of the cost.
    mass_RV = logits_RV.sub_(values_RK[:, :1]).exp_()
    log_mass_R = mass_RV.sum(-1).log()
    tail_R = mass_RV.scatter_(-1, ids_RK, 0.0).sum(-1).log() - log_mass_R
    logprobs_RK = values_RK - values_RK[:, :1] - log_mass_R[:, None]
    return ids_RK.to(torch.int32), logprobs_RK.to(torch.float16), tail_R


def summarise_rows(
    logits: torch.Tensor, row_R: torch.Tensor, top_k: int, max_elements: int = 1 << 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`summarise` of some rows of the logits, which stay as they are, with room for `max_elements` floats at a time:
    the engine's memory is spoken for."""
    parts = row_R.split(max(1, max_elements // logits.shape[-1]))
    ids, logprobs, tails = zip(*(summarise(logits[rows], top_k) for rows in parts), strict=True)
    return torch.cat(ids), torch.cat(logprobs), torch.cat(tails)


def kinds_of(sampled_BG: np.ndarray, num_drafts_B: np.ndarray) -> np.ndarray:
    """[B, G + 1]: REJECTED, ACCEPTED or PLAIN for each emitted token, -1 elsewhere.

    All emitted tokens but a request's last are accepted draft tokens; the last one replaces a rejected draft token, or
    follows the last draft token, where nothing was proposed.
    """
    num_emitted_B1 = (sampled_BG >= 0).sum(1, keepdims=True)
    offset_G = np.arange(sampled_BG.shape[1])
    last = np.where(num_emitted_B1 - 1 < num_drafts_B[:, None], REJECTED, PLAIN)
    kind_BG = np.where(offset_G < num_emitted_B1 - 1, ACCEPTED, last)
    return np.where(offset_G < num_emitted_B1, kind_BG, -1).astype(np.int8)
