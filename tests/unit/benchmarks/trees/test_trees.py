"""Prices, crossovers and successes of `osd bench trees` against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.record import Options, Row
from benchmarks.replays.step_times import published
from benchmarks.trees import prices, success_rules, trees
from benchmarks.trees.prices import (
    LLAMA_1B,
    LLAMA_8B,
    MAX_BATCH,
    NONE,
    Price,
    Published,
    num_nodes,
    num_read,
    overtaken,
    pool_costs,
)
from benchmarks.trees.report import summarise
from benchmarks.trees.runs import Bench
from serving.trees.dice import Dice, RandomDice
from serving.trees.expand import grow
from serving.trees.tree import Tree
from serving.trees.verify import Rule, multi_step, naive
from tests.support.all_outcomes import all_outcomes
from tests.support.tiny_drafts import tiny_llama

P_V, Q_V = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.1, 0.3, 0.1])


def test_nodes_of_the_three_shapes() -> None:
    assert [num_nodes(widths) - 1 for widths in trees.SHAPES] == [3, 6, 21]
    assert [num_nodes(NONE), num_read(NONE)] == [1, 0]
    assert [num_read(widths) for widths in trees.SHAPES] == [3, 5, 10]


def test_a_price_is_found_again() -> None:
    price = Price(target_s=0.03, per_node_s=0.001, draft_s=0.002, per_read_s=0.0001)
    rows: list[Row] = []
    for widths in (NONE, *trees.SHAPES):
        for batch in (1, 4, 16):
            target_s = 0.03 + 0.001 * batch * num_nodes(widths)
            draft_s = 0.002 * len(widths) + 0.0001 * batch * num_read(widths)
            assert price.step(widths, batch) == pytest.approx(target_s + draft_s)
            rows.append(
                {"widths": widths, "batch": batch, "target_s": target_s, "draft_s": draft_s}
            )
    found = Price.fitted(rows)
    assert [found.target_s, found.per_node_s] == pytest.approx([0.03, 0.001])
    assert [found.draft_s, found.per_read_s] == pytest.approx([0.002, 0.0001])


def test_the_published_price_is_the_one_of_the_other_benches() -> None:
    """For chains of 4 draft tokens in a batch of 4, but for what the draft reads."""
    found = Published().step((1, 1, 1, 1), 4)
    assert found == pytest.approx(published(4096).step(4, drafts=True) + 8.414e-7 * (16 - 4))
    assert Published().step(NONE, 4) == pytest.approx(published(4096).step(0, drafts=False))


def test_where_the_chain_overtakes() -> None:
    """With x = seconds of a node x batch, (10 + 4 x) / 2 = (10 + 22 x) / 3.3 at x = 0.422."""

    def at(per_node_s: float) -> int:
        price = Price(target_s=10.0, per_node_s=per_node_s, draft_s=0.0, per_read_s=0.0)
        return overtaken(price, trees.TWENTY_ONE, 3.3, trees.CHAIN, 2.0)

    assert [at(1.0), at(0.01), at(0.0)] == [1, 43, MAX_BATCH]
    free = Price(target_s=10.0, per_node_s=0.0, draft_s=0.0, per_read_s=0.0)
    assert overtaken(free, trees.TWENTY_ONE, 2.0, trees.CHAIN, 2.0) == 1  # as fast is enough


def test_costs_of_a_pool() -> None:
    one, three = (pool_costs(LLAMA_8B, LLAMA_1B, pool, trees.SIX, batch=4) for pool in (1, 3))
    assert prices.kv_bytes(LLAMA_8B) == 128 * 1024
    assert prices.kv_bytes(LLAMA_1B) == 32 * 1024
    assert one["trees in the target's KV"] == 4 * 7 * 128 * 1024
    assert three["trees in the target's KV"] == 4 * 19 * 128 * 1024
    assert three["weights of the drafts"] == 3 * one["weights of the drafts"]
    assert one["context of the drafts"] == 4 * 1024 * 32 * 1024
    share = one["FLOPs of the drafts"] / one["FLOPs of the target"]
    assert one["FLOPs over no speculation"] == pytest.approx(7 * (1 + share))


def exact(rule: Rule, how: str, k: int) -> float:
    """The probability that one of k children is accepted, over every outcome."""

    def is_accepted(dice: Dice) -> bool:
        tree = Tree(0)
        grow(tree, [0], [Q_V], k, how, dice)
        return rule(tree, lambda node: P_V, dice).num_accepted > 0

    return sum(p for found, p in all_outcomes(is_accepted) if found)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("success", "rule", "how"),
    [
        (success_rules.multi_step_of_drawn, multi_step, "sampled"),
        (success_rules.naive_of_drawn, naive, "sampled"),
        (success_rules.mass_of_top, multi_step, "top"),
    ],
)
def test_successes_are_those_of_the_engine(
    success: Callable[..., float], rule: Rule, how: str, k: int
) -> None:
    assert success(P_V, Q_V, k) == pytest.approx(exact(rule, how, k))


def test_drawn_trees_succeed_as_often_as_they_should() -> None:
    dice = RandomDice(0)
    found = [success_rules.multi_step_of_distinct(dice, P_V, Q_V, 2) for _ in range(500)]
    assert np.mean(found) == pytest.approx(exact(multi_step, "distinct", 2), abs=0.03)


def test_greedy_success_is_of_the_likeliest() -> None:
    assert [success_rules.likeliest_among_top(P_V, Q_V, k) for k in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_successes_are_read_where_the_target_chose_each_token() -> None:
    """Held against both models asked token by token."""
    target, draft = (tiny_llama(seed, scale=0.4) for seed in (0, 1))
    prompt, answer = [5, 9, 2], [7, 1, 30, 4, 4, 61, 12, 8, 19, 50]

    def places() -> Iterator[int]:
        for at in range(len(answer)):
            ids = torch.tensor([prompt + answer[:at]])
            ours, theirs = (model(ids).logits[0, -1] for model in (target, draft))
            yield int((theirs > theirs[ours.argmax()]).sum())

    ks, found = tuple(range(1, 65)), list(places())
    wanted = [np.mean([place < k for place in found]) for k in ks]
    rows = success_rules.successes(target, draft, [(prompt, answer)], 0.0, ks)
    assert [row["success"] for row in rows] == [pytest.approx([share]) for share in wanted]


def test_the_time_of_the_target_is_that_of_its_pass_and_of_verification() -> None:
    bench = Bench.__new__(Bench)  # without its trained models
    bench.target, bench.drafts = tiny_llama(0), {"good": tiny_llama(1)}
    bench.prompts = [[5, 9, 2], [7, 3]]
    found = bench.times("good", (2, 1), batch=2, num_tokens=1)
    assert found["num_steps"] == 1
    assert found["step_s"] == pytest.approx(found["draft_s"] + found["target_s"], rel=1e-9)


def rows_of(plan: Any) -> list[Row]:
    """As of a run in which a wider tree brings more, and costs nothing more to read."""
    rows: list[Row] = []
    for draft in trees.NOISE:
        for temperature in trees.TEMPERATURES:
            case = {"draft": draft, "temperature": temperature}
            for widths in dict.fromkeys((*trees.SHAPES, *trees.grid(plan))):
                brought = [2.0 + 0.1 * sum(widths), 2.2 + 0.1 * sum(widths)]
                found = {"tokens_per_step": brought, "accepted_per_step": brought}
                rows.append({"kind": "steps", "rule": "", "widths": widths} | case | found)
        for rule, success in ((trees.MULTI_STEP, [0.6, 0.8]), (trees.NAIVE, [0.5, 0.6])):
            case = {"draft": draft, "temperature": 1.0}
            rows.append({"kind": "success", "rule": rule, "k": 2, "success": success} | case)
        for rule, accepted in (("multi-step", [0.9, 1.1]), ("naive", [0.7, 0.9])):
            case = {"draft": draft, "temperature": 1.0, "widths": trees.SIX}
            rows.append({"kind": "steps", "rule": rule, "accepted_per_step": accepted} | case)
    for batch in plan.sizes["batches"]:
        for widths in (NONE, *trees.SHAPES):
            draft_s = 0.1 * len(widths)
            times = {"step_s": 1.0 + draft_s, "target_s": 1.0, "draft_s": draft_s}
            rows.append({"kind": "times", "batch": batch, "widths": widths} | times)
    return rows


def test_the_report_says_what_the_rows_hold(tmp_path: Any) -> None:
    plan = trees.protocol(Options(directory=tmp_path))
    result = summarise(plan, rows_of(plan))
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    case = "middling draft, T = 1"
    assert found[f"tokens per step: {case}", "⟨3, 2, 2⟩"] == pytest.approx(2.8)
    assert found[f"success: {case}, k = 2", trees.GAIN] == pytest.approx(0.7 / 0.55)
    timed = found[f"speed, timed here: {case}", "⟨2, 1, 1⟩ / ⟨1, 1, 1⟩, batch 16"]
    assert timed == pytest.approx(2.5 / 2.4)
    by_rule = found[f"accepted per step, drawn: {case}", "multi-step / naive, ⟨2, 1, 1⟩"]
    assert by_rule == pytest.approx(1.0 / 0.8)
    over_none = found[f"speed over none, batch 1, as measured here: {case}", "⟨3, 1, 1⟩"]
    assert over_none == pytest.approx(2.6 / 1.3)
    beyond = "⟨3, 2, 2⟩: ahead of the chain at every batch below"
    assert found[f"as measured here: {case}", beyond] == MAX_BATCH
    published_at = "⟨3, 2, 2⟩: the chain is as fast from batch"
    assert 1 < found[f"published (8 B, H100; modelled): {case}", published_at] < 64
    assert all(is_met for _, _, is_met in result.verdicts()) and not result.unjudged()
