"""An EAGLE-3 head on batches of served text: what it proposes at each depth, and how far that is
from the target.

Served tokens are what the target accepted, so along them a head drafts as it does in the engine.
The row of a token therefore serves every depth: at depth j the head began j tokens earlier
(training-time test, arXiv 2503.01840 section 3.2).

    token at s + 1 (row s)   depth 0: features up to s − 1, embedding of token s
                             depth 1: features up to s − 2, embeddings of s − 1 and s, own state
                             ...      the chain of depth j begins at s − 1 − j

Legend: B lines, S tokens, C chains of a line, N rows, G depths, H hidden size, F features of all
taps, D draft vocabulary, V the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from osd.common.model_directory import WEIGHTS
from osd.models.eagle3 import canonical
from trainer.batch import Batch, Proposals, RowBatch, TrainBatch, likeliest
from trainer.eagle3.layer import Chain, Eagle3Head
from trainer.eagle3.vocabulary import DraftVocabulary
from trainer.loss import Coarse, coarsen

DECAY = 0.8
"""Weight of a depth relative to the one before it (EAGLE's `main.py`)."""
Features = Callable[[RowBatch], Tensor]
"""The target's hidden states at the taps, [B, S, F], for the tokens of a batch."""


class HeadModel(nn.Module):
    """A head, the embedding it reads, and where its features come from. Used as a `RowModel` is.

    embedding_VH: the target's, or the head's own; never trained
    num_depths: draft tokens of a step, G
    kept: tensors of the checkpoint that are not trained
    config: what its `config.json` holds
    """

    can_pack = True

    def __init__(
        self,
        hf: Eagle3Head,
        vocabulary: DraftVocabulary,
        embedding_VH: Tensor,
        features: Features,
        num_depths: int,
        kept: Mapping[str, Tensor],
        config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.hf, self.vocabulary, self.num_depths = hf, vocabulary, num_depths
        self._features, self._kept, self._config = features, kept, config
        self.register_buffer("embedding_VH", embedding_VH, persistent=False)

    @property
    def vocab_size(self) -> int:
        """Ids that a text may hold."""
        return self.hf.spec.vocab_size

    @property
    def max_length(self) -> int:
        """Tokens in the head's context."""
        return int(self.hf.config.max_position_embeddings)

    def names_in_model(self, stored: Collection[str], known: Collection[str]) -> dict[str, str]:
        """Name in the checkpoint -> name in the head."""
        return {name: canonical(name) for name in stored}

    def prepared(self, batch: Batch) -> Batch:
        """The batch with the target's features."""
        return replace(batch, features_BSF=self._features(batch))

    def inputs(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """What `forward` takes."""
        assert batch.features_BSF is not None, "a head reads features"
        return *batch.inputs, batch.features_BSF

    def forward(
        self,
        ids_BS: Tensor,
        position_ids_BS: Tensor,
        row_b_N: Tensor,
        row_s_N: Tensor,
        features_BSF: Tensor,
    ) -> list[Tensor]:
        """Logits over the draft vocabulary at each depth, G of [N, D]. Where the chain of a depth
        would begin before the text they mean nothing."""
        chains = _Chains.of(position_ids_BS, row_b_N, row_s_N, self.num_depths)
        hidden_BSH = self.hf.combine(features_BSF)
        context = self.hf.context(
            self._embedded(ids_BS.roll(-1, 1)), hidden_BSH, position_ids_BS, chains.is_seen_BCS
        )
        begin_BC, chain, logits = chains.begin_BC, Chain(), []
        position_BC = position_ids_BS.gather(1, begin_BC)
        hidden_BCH = hidden_BSH.gather(1, begin_BC[..., None].expand(-1, -1, hidden_BSH.shape[-1]))
        for depth in range(self.num_depths):
            next_BC = (begin_BC + 1 + depth).clamp(max=ids_BS.shape[1] - 1)
            step = self.hf.step(
                self._embedded(ids_BS.gather(1, next_BC)),
                hidden_BCH,
                position_BC + depth,
                context,
                chain,
                is_first=depth == 0,
            )
            hidden_BCH = step.fed_back_BCH
            logits.append(self.hf.lm_head(step.normed_BCH[row_b_N, chains.chain_GN[depth]]))
        return logits

    def distances(self, logits: list[Tensor], batch: TrainBatch) -> Iterator[tuple[Tensor, Coarse]]:
        """The draft and the target at each depth, and the share [N] of the depth in the loss of its
        row. The shares of a row sum to 1, or are 0 where no depth reaches it."""
        rows = self.vocabulary.restrict(batch)
        weight_GN = _is_reached(batch, self.num_depths) * self._decay(batch.row_s_N.device)
        share_GN = weight_GN / weight_GN.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
        for share_N, logits_ND in zip(share_GN, logits, strict=True):
            yield (
                share_N,
                coarsen(
                    logits_ND, rows.target_ids_NK, rows.target_logprobs_NK, rows.tail_logprob_N
                ),
            )

    def proposals(self, batch: RowBatch) -> Proposals:
        """The target's ids that the head would propose; -1 where the chain of a depth would begin
        before the text."""
        logits, is_reached_GN = self(*self.inputs(batch)), _is_reached(batch, self.num_depths)
        ids_GN = torch.stack([self.vocabulary.to_target(depth.argmax(-1)) for depth in logits])
        likeliest_KN = likeliest(logits[0])
        is_known_KN = is_reached_GN[0] & (likeliest_KN >= 0)
        first_KN = self.vocabulary.to_target(likeliest_KN.clamp(min=0))
        return Proposals(
            ids_GN=ids_GN.masked_fill(~is_reached_GN, -1),
            likeliest_KN=first_KN.masked_fill(~is_known_KN, -1),
        )

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a head of these weights, for `load_draft`."""
        (directory / "config.json").write_text(json.dumps(dict(self._config), indent=2))
        tensors = {n: t.detach().cpu().contiguous() for n, t in {**self._kept, **weights}.items()}
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    def _embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.get_buffer("embedding_VH"))

    def _decay(self, device: torch.device) -> Tensor:
        """[G, 1]"""
        return DECAY ** torch.arange(self.num_depths, device=device)[:, None]


def _is_reached(batch: RowBatch, num_depths: int) -> Tensor:
    """bool [G, N]; whether the chain of a depth begins within the text of its row."""
    position_N = batch.position_ids_BS[batch.row_b_N, batch.row_s_N]
    return position_N >= 1 + torch.arange(num_depths, device=position_N.device)[:, None]


class _Chains(NamedTuple):
    """Where drafts begin so that every row is drafted at every depth. Other tokens, such as most of
    a prompt, cost only their keys and values."""

    begin_BC: Tensor
    """int64; the token whose features a chain begins with"""
    chain_GN: Tensor
    """int64; the chain in its line that drafts a row at a depth"""
    is_seen_BCS: Tensor
    """bool; tokens of the same text up to where the chain begins"""

    @classmethod
    def of(
        cls, position_ids_BS: Tensor, row_b_N: Tensor, row_s_N: Tensor, num_depths: int
    ) -> _Chains:
        depth_G = torch.arange(num_depths, device=row_s_N.device)
        begin_GN = (row_s_N - 1 - depth_G[:, None]).clamp(min=0)
        is_begin_BS = torch.zeros_like(position_ids_BS, dtype=torch.bool)
        is_begin_BS[row_b_N.expand_as(begin_GN), begin_GN] = True
        rank_BS = is_begin_BS.cumsum(1) - 1
        num_chains = int(rank_BS.max()) + 1
        begins_first_BS = is_begin_BS.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        begin_BC = begins_first_BS[:, :num_chains]
        text_BS = (position_ids_BS == 0).cumsum(1)
        token_S = torch.arange(position_ids_BS.shape[1], device=row_s_N.device)
        is_seen_BCS = (token_S <= begin_BC[..., None]) & (
            text_BS[:, None] == text_BS.gather(1, begin_BC)[..., None]
        )
        return cls(begin_BC, rank_BS[row_b_N.expand_as(begin_GN), begin_GN], is_seen_BCS)
