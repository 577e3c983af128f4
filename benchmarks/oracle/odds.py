"""What a draft token's chances are: the target's probability of each token of a draft, wherever the
draft may begin.

At a temperature above 0 nobody can know what will be accepted, as it is drawn. At most one can know
the odds, and those are computed here: the target reads every draft behind the text that was served.

Legend: T output tokens, K draft tokens, S all tokens of prompt and answer, Q tokens read, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.replays.closed_loop import DRAFT, MEMORY
from osd.evaluate.bound.runs import ProposerRuns, RequestRuns
from osd.records import Trace


def with_odds(
    request: RequestRuns, answer: Trace, target: Any, draft: Any, temperature: float
) -> RequestRuns:
    """The same with `odds`. target, draft: models of transformers; the memory's tokens are known.
    `temperature`: above 0, at which the answer was drawn."""
    drafted_TK = chains(draft, answer, int(request.proposers[DRAFT].offered.max(initial=0)))
    by_proposer = {DRAFT: drafted_TK, MEMORY: request.proposers[MEMORY].tokens}
    return replace(
        request,
        proposers={
            name: _with_odds(request.proposers[name], answer, tokens, target, temperature)
            for name, tokens in by_proposer.items()
        },
    )


def _with_odds(
    runs: ProposerRuns,
    answer: Trace,
    tokens_TK: np.ndarray | None,
    target: Any,
    temperature: float,
) -> ProposerRuns:
    assert tokens_TK is not None, "a proposer tells what it proposes"
    num = tokens_TK.shape[1]
    if not num or not len(tokens_TK):
        return replace(runs, odds=np.zeros(tokens_TK.shape))
    ids_TK = torch.from_numpy(np.maximum(tokens_TK, 0))
    logits_TKV = logits_behind(target, answer, ids_TK[:, : num - 1])
    chances_TKV = (logits_TKV / temperature).softmax(-1)
    odds_TK = chances_TKV.gather(-1, ids_TK[..., None])[..., 0].double().numpy()
    return replace(runs, odds=np.where(tokens_TK < 0, 0.0, odds_TK))


def chains(model: Any, answer: Trace, num: int) -> np.ndarray:
    """int64 [T - 1, num]: what a greedy draft model proposes, by output position."""
    ids_TK = torch.zeros((max(len(answer.output_ids) - 1, 0), 0), dtype=torch.int64)
    for _ in range(num if len(ids_TK) else 0):
        likeliest_T1 = logits_behind(model, answer, ids_TK)[:, -1:].argmax(-1)
        ids_TK = torch.cat([ids_TK, likeliest_T1], 1)
    return ids_TK.numpy()


@torch.no_grad()
def logits_behind(model: Any, answer: Trace, chains_TK: Tensor) -> Tensor:
    """float [T - 1, K + 1, V]: after each served prefix of 1 to T - 1 output tokens, and after each
    token of the chain behind it. One pass: a chain sees its own prefix and itself alone."""
    num_prompt, num = len(answer.prompt_ids), chains_TK.shape[1]
    served_S = torch.from_numpy(np.concatenate([answer.prompt_ids, answer.output_ids])).long()
    starts_T = num_prompt + 1 + torch.arange(len(chains_TK))  # tokens before the chain
    ids_Q = torch.cat([served_S, chains_TK.flatten()])
    places_TK = starts_T[:, None] + torch.arange(num)
    places_Q = torch.cat([torch.arange(len(served_S)), places_TK.flatten()])
    owner_Q = torch.cat([torch.full((len(served_S),), -1), _rows(chains_TK)])
    reach_Q = torch.cat([places_Q[: len(served_S)], (starts_T - 1).repeat_interleave(num)])
    is_served_Q = owner_Q < 0
    seen_QQ = (is_served_Q & (places_Q <= reach_Q[:, None])) | (
        ~is_served_Q & (owner_Q == owner_Q[:, None]) & (places_Q <= places_Q[:, None])
    )
    mask = torch.zeros(seen_QQ.shape).masked_fill(~seen_QQ, torch.finfo(torch.float32).min)
    logits_QV = model(
        input_ids=ids_Q[None], position_ids=places_Q[None], attention_mask=mask[None, None]
    ).logits[0]
    chained_TKV = logits_QV[len(served_S) :].view(len(chains_TK), num, logits_QV.shape[-1])
    return torch.cat([logits_QV[starts_T - 1][:, None], chained_TKV], 1)


def _rows(chains_TK: Tensor) -> Tensor:
    """For each token, which chain it is of."""
    return torch.arange(len(chains_TK)).repeat_interleave(chains_TK.shape[1])
