"""Ids of the draft vocabulary, and rows of the target in them."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.builders import make_trace
from trainer.batch import collate
from trainer.eagle3.vocabulary import DraftVocabulary
from trainer.loss import coarsen, forward_kl

D2T = torch.tensor([1, 1, 3])
"""Draft ids 0, 1, 2 are the target's 1, 2, 5."""


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary(D2T, num_draft=3, num_target=6)


def test_offsets_give_the_targets_ids() -> None:
    assert vocabulary().to_target(torch.tensor([0, 1, 2])).tolist() == [1, 2, 5]
    whole = DraftVocabulary(None, num_draft=6, num_target=6)
    assert whole.to_target(torch.arange(6)).tolist() == list(range(6))


def test_a_row_in_ids_of_the_draft_keeps_its_mass() -> None:
    p = np.array([[0.5, 0.2, 0.1]])
    trace = make_trace(vocab_size=6, num_rows=1).with_rows(np.array([True]))
    trace = type(trace)(
        **{f: getattr(trace, f) for f in trace.__dataclass_fields__}
        | {
            "target_ids": np.array([[5, 0, 1]], np.int32),
            "target_logprobs": np.log(p).astype(np.float16),
            "tail_logprob": np.log([0.2]).astype(np.float32),
        }
    )
    rows = vocabulary().restrict(collate([trace], 64, 6))
    known = rows.target_logprobs_NK.exp()[0]
    assert rows.target_ids_NK[0, [0, 2]].tolist() == [2, 0]
    torch.testing.assert_close(known, torch.tensor([0.5, 0.0, 0.1]), atol=1e-3, rtol=0)
    torch.testing.assert_close(rows.tail_logprob_N.exp()[0], torch.tensor(0.4), atol=1e-3, rtol=0)


def test_the_loss_is_smallest_where_the_draft_has_the_targets_shares_and_the_rest_elsewhere() -> (
    None
):
    """By hand: target 0.5 on id 5, 0.1 on id 1, 0.4 on all others, of which the draft has id 2."""
    logp = torch.log(torch.tensor([[0.5, 0.1]]))
    args = (torch.tensor([[2, 0]]), logp, torch.log(torch.tensor([0.4])))
    best = torch.log(torch.tensor([[0.1, 0.4, 0.5]]))
    worse = torch.log(torch.tensor([[0.3, 0.2, 0.5]]))
    torch.testing.assert_close(forward_kl(coarsen(best, *args)), torch.zeros(1))
    expected = 0.1 * np.log(0.1 / 0.3) + 0.4 * np.log(0.4 / 0.2)
    torch.testing.assert_close(
        forward_kl(coarsen(worse, *args)), torch.tensor([expected], dtype=torch.float32)
    )
