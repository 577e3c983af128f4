"""The draft vocabulary of a head: fewer tokens than the target has.

Legend: D draft vocabulary, V the target's, N rows, K top-k.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.batch import TrainBatch


class DraftVocabulary(nn.Module):
    """Maps ids of the draft to ids of the target, and back.

    d2t: int64 [D], offsets: draft id i is the target's id i + d2t[i]; None = the same ids
    """

    def __init__(self, d2t_D: Tensor | None, num_draft: int, num_target: int) -> None:
        super().__init__()
        ids_D = torch.arange(num_draft)
        target_D = ids_D if d2t_D is None else ids_D + d2t_D
        draft_V = torch.full((num_target,), -1)
        draft_V[target_D] = ids_D
        self.register_buffer("target_D", target_D, persistent=False)
        self.register_buffer("draft_V", draft_V, persistent=False)

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the target."""
        return self.get_buffer("target_D")[ids]

    def restrict(self, batch: TrainBatch) -> TrainBatch:
        """The same rows in ids of the draft. Tokens that the draft does not have count as part of
        the rest: it cannot propose them, and the mass on them is none that it should place."""
        ids_NK = self.get_buffer("draft_V")[batch.target_ids_NK]
        is_known_NK = ids_NK >= 0
        outside_NK = batch.target_logprobs_NK.masked_fill(is_known_NK, -torch.inf)
        return replace(
            batch,
            target_ids_NK=ids_NK.clamp(min=0),
            target_logprobs_NK=batch.target_logprobs_NK.masked_fill(~is_known_NK, -torch.inf),
            tail_logprob_N=torch.logaddexp(batch.tail_logprob_N, outside_NK.logsumexp(1)),
        )
