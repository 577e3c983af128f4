"""The odds of a draft token are the target's, asked one prefix at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.oracle.odds import chains, logits_behind, with_odds
from benchmarks.replays.closed_loop import DRAFT, MEMORY
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from osd.records import Trace
from tests.support.tiny_drafts import tiny_llama

PROMPT, OUTPUT = [1, 2, 3, 4], [5, 6, 7, 8, 9, 10]
ANSWER = Trace.of_text(PROMPT, OUTPUT)
NUM = len(OUTPUT) - 1
K = 3


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_llama(seed=1, scale=0.3)


@pytest.fixture(scope="module")
def draft() -> Any:
    return tiny_llama(seed=2, scale=0.3)


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """float [V]: after these tokens."""
    return model(input_ids=torch.tensor([ids])).logits[0, -1]  # type: ignore[no-any-return]


def test_a_chain_is_what_the_draft_proposes_behind_each_prefix(draft: Any) -> None:
    found = chains(draft, ANSWER, K)
    assert found.shape == (NUM, K) and len(set(found.flatten().tolist())) > 3
    for t in range(1, len(OUTPUT)):
        ids = PROMPT + OUTPUT[:t]
        for _ in range(K):
            ids.append(int(logits_of(draft, ids).argmax()))
        assert found[t - 1].tolist() == ids[-K:]


def test_chains_do_not_see_each_other(target: Any) -> None:
    tokens = torch.randint(0, 64, (NUM, K), generator=torch.Generator().manual_seed(0))
    found = logits_behind(target, ANSWER, tokens)
    for t in range(1, len(OUTPUT)):
        for i in range(K + 1):
            one = logits_of(target, PROMPT + OUTPUT[:t] + tokens[t - 1, :i].tolist())
            torch.testing.assert_close(found[t - 1, i], one, atol=1e-5, rtol=1e-5)


def test_odds_are_tempered_and_none_beyond_what_is_offered(target: Any, draft: Any) -> None:
    remembered = np.array([[7, 9, -1], [-1, -1, -1], [8, -1, -1], [9, 1, 2], [3, 3, 3]])
    offered = (remembered >= 0).sum(1)
    request = RequestRuns(
        num_prompt=len(PROMPT),
        num_output=len(OUTPUT),
        proposers={
            DRAFT: ProposerRuns.of_model(np.zeros(NUM, np.int64), 2),
            MEMORY: ProposerRuns(right=np.minimum(offered, 1), offered=offered, tokens=remembered),
        },
    )
    found = with_odds(request, ANSWER, target, draft, temperature=0.5).proposers
    odds = found[MEMORY].odds
    assert odds is not None and ((odds > 0) == (remembered >= 0)).all()
    expected = (logits_of(target, [*PROMPT, *OUTPUT[:1], 7]) / 0.5).softmax(-1)[9]
    assert odds[0, 1] == pytest.approx(float(expected), rel=1e-4)
    drafted = found[DRAFT].odds
    assert drafted is not None and drafted.shape == (NUM, 2)
    first = chains(draft, ANSWER, 1)[2, 0]
    expected = (logits_of(target, PROMPT + OUTPUT[:3]) / 0.5).softmax(-1)[first]
    assert drafted[2, 0] == pytest.approx(float(expected), rel=1e-4)


def test_an_answer_that_prefill_ends_has_no_odds(target: Any, draft: Any) -> None:
    none = np.zeros(0, np.int64)
    runs = {
        DRAFT: ProposerRuns.of_model(none, 2),
        MEMORY: ProposerRuns(right=none, offered=none, tokens=np.zeros((0, 3), np.int64)),
    }
    request = RequestRuns(num_prompt=len(PROMPT), num_output=1, proposers=runs)
    found = with_odds(request, Trace.of_text(PROMPT, [5]), target, draft, 0.7)
    assert all(len(runs.odds) == 0 for runs in found.proposers.values() if runs.odds is not None)
