"""How many draft tokens are accepted where the engine draws them from the draft's distribution q
(vLLM's `draft_sample_method` "probabilistic").

One is accepted with probability Σ min(p, q) = 1 - TV (arXiv 2211.17192, section 3.3), which the
captured rows show: they hold the target's p, and a row that was kept with probability 1/2 stands
for two positions. p is as the request sampled. Of the request's parameters, vLLM's drafts follow
the temperature alone. Rows that contradict the text are left out, as in training.

Legend: R traces, G draft tokens per step, N rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from osd.records import Trace
from trainer.batch import TrainBatch, collate, is_believable, to_device
from trainer.draft import Draft
from trainer.loss import acceptance, at_sampling

Sums = tuple[np.ndarray, np.ndarray]
"""float64 [R, G]: tokens of all of them, and of these the accepted ones."""


def expected_counts(
    models: Sequence[Draft], traces: Sequence[Trace], k: int, max_length: int, batch_size: int
) -> list[Sums]:
    """Per draft: tested and accepted tokens in steps of k, as the engine is expected to count them.

    A position that has been reached is tested at depth g where the g tokens before it were
    accepted, for which all requests together say how likely that is: where requests differ much,
    α reads a little high, of all drafts alike. What ends with its request counts as whole.
    """
    drafted = [_drafted(trace) for trace in traces]
    order = [r for r, trace in enumerate(drafted) if trace.num_rows]
    order.sort(key=lambda r: int(drafted[r].position[-1]))
    found: list[list[Sums]] = [[] for _ in models]
    for start in range(0, len(order), batch_size):
        chosen = [drafted[r] for r in order[start : start + batch_size]]
        for of_model, sums in zip(found, _at_each_depth(models, chosen, max_length), strict=True):
            of_model.append(sums)
    counted = []
    for of_model in found:
        tested_RG, accepted_RG = np.zeros((len(traces), k)), np.zeros((len(traces), k))
        if of_model:
            num_RG, at_RG = (np.concatenate(part) for part in zip(*of_model, strict=True))
            tested_RG[order], accepted_RG[order] = _in_steps(num_RG, at_RG, k)
        counted.append((tested_RG, accepted_RG))
    return counted


def _drafted(trace: Trace) -> Trace:
    """Without the row of the first token, which is never drafted."""
    if not trace.num_rows:
        return trace
    return trace.with_rows(is_believable(trace) & (trace.position > len(trace.prompt_ids)))


def _in_steps(num_RG: np.ndarray, accepted_RG: np.ndarray, k: int) -> Sums:
    """Spread what would be accepted at each depth over the depths. A step ends with one token more
    than it accepts."""
    depth_G = np.minimum(np.arange(k), num_RG.shape[1] - 1)
    num_RG, accepted_RG = num_RG[:, depth_G], accepted_RG[:, depth_G]
    alpha_G = accepted_RG.sum(0) / np.maximum(num_RG.sum(0), np.finfo(float).tiny)
    reached_G = np.cumprod([1.0, *alpha_G[:-1]])
    share_G = reached_G / (1 + (reached_G * alpha_G).sum())
    return num_RG * share_G, accepted_RG * share_G


@torch.no_grad()
def _at_each_depth(
    models: Sequence[Draft], traces: Sequence[Trace], max_length: int
) -> Iterator[Sums]:
    """Per draft: positions that the rows stand for, and those of them where a token is accepted."""
    first = models[0]
    max_length = min([max_length, *(model.max_length for model in models)])
    batch = collate(traces, max_length, first.vocab_size, packed=first.can_pack)
    temperature_N = torch.tensor([trace.temperature for trace in traces])[batch.trace_N]
    batch = _as_sampled(batch, traces, temperature_N, first.vocab_size)
    batch = to_device(first.prepared(batch), next(first.parameters()).device)
    temperature_N1 = temperature_N.to(batch.weight_N.device)[:, None]
    num_N = batch.weight_N.double().cpu().numpy() * batch.num_positions
    trace_N = batch.trace_N.cpu().numpy()
    for model in models:
        logits: Any = model(*model.inputs(batch))
        is_one = isinstance(logits, Tensor)
        scaled: Any = logits / temperature_N1 if is_one else [g / temperature_N1 for g in logits]
        sums = []
        for share_N, both in model.distances(scaled, batch):
            at_N = num_N * (share_N > 0).cpu().numpy()
            accepted_N = at_N * acceptance(both, batch.tail_logprob_N).cpu().numpy()
            sums.append([np.bincount(trace_N, n, len(traces)) for n in (at_N, accepted_N)])
        num_RG, accepted_RG = np.array(sums).transpose(1, 2, 0)
        yield num_RG, accepted_RG


def _as_sampled(
    batch: TrainBatch, traces: Sequence[Trace], temperature_N: Tensor, num_tokens: int
) -> TrainBatch:
    """The rows with the target's distribution from which each request was sampled."""
    logprobs_NK, tail_N = at_sampling(
        batch.target_logprobs_NK,
        batch.tail_logprob_N,
        num_tokens,
        temperature_N,
        torch.tensor([trace.top_p for trace in traces])[batch.trace_N],
        torch.tensor([trace.top_k for trace in traces])[batch.trace_N],
    )
    return replace(batch, target_logprobs_NK=logprobs_NK, tail_logprob_N=tail_N)
