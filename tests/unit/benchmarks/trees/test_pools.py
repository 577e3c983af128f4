"""Figures of `osd bench pools` from made-up rows, and the answers that its drafts learn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.record import Options, Row
from benchmarks.traffic import recordings
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, TRAINING
from benchmarks.trees import pools
from buffers.trace_file import TraceFile
from osd.records import PLAIN
from tests.support.pairs import build_pair
from tests.unit.benchmarks.drift.test_contenders import recorded


def rows_of(gain: float) -> list[Row]:
    """Two drafts: the pool's bring so much more than one of as many nodes."""
    rows: list[Row] = [{"kind": "pool", "num_drafts": 2}]
    for temperature in (0.0, 1.0):
        for num in (1, 2):
            for arm in (pools.POOL, pools.FIRST):
                more = gain * (num == 2 and arm == pools.POOL)
                brought = [2.0 + 0.1 * num + more, 2.4 + 0.1 * num + more]
                case = {"arm": arm, "num": num, "temperature": temperature}
                rows.append({"kind": "steps", "tokens_per_step": brought} | case)
    return rows


@pytest.mark.parametrize("gain", [0.3, -0.3])
def test_the_pool_is_held_against_one_draft_with_as_many_nodes(gain: float, tmp_path: Path) -> None:
    plan = pools.protocol(Options(directory=tmp_path))
    result = pools.summarise(plan, rows_of(gain))
    found = {(figure.group, figure.name): figure.value for figure in result.figures}
    assert found["the pool", "drafts trained"] == 2
    assert found["tokens per step, T = 0", "draft 1 alone, 6 nodes"] == pytest.approx(2.4)
    assert found["2 drafts, T = 1", pools.GAIN] == pytest.approx(gain)
    assert [is_met for *_, is_met in result.verdicts()] == [gain > 0] * 2


def test_the_drafts_learn_from_every_token_of_every_answer(
    tmp_path: Path, monkeypatch: Any
) -> None:
    pair, asked = build_pair(tmp_path / "pair"), []

    def take(family: str, domain: str, block: int, num: int) -> list[Any]:
        asked.append((family, domain, block, num))
        return recorded(num)

    monkeypatch.setattr(recordings, "take", take)
    monkeypatch.setitem(
        FAMILIES, "tiny", replace(FAMILIES["tiny"], models=lambda: (pair.target, pair.draft))
    )
    sizes = {"domains": ["sql", "python"], "training_requests": 3}
    with TraceFile(pools._written(sizes, tmp_path / "a.traces"), print) as file:
        traces = list(file)
    assert asked == [("tiny", "sql", TRAINING, 3), ("tiny", "python", TRAINING, 3)]
    assert len({trace.trace_id for trace in traces}) == 6
    for trace in traces:
        assert len(trace.position) == len(trace.output_ids)
        assert np.all(trace.kind == PLAIN) and np.all(trace.keep_prob == 1)


def test_both_arms_answer_what_no_draft_learnt_from_with_as_many_nodes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Draft 2 is the target: where it takes part, every step is followed to its end."""
    pair, asked = build_pair(tmp_path / "pair", noise=0.3), set()

    def requests(domain: str, block: int, num: int) -> list[Any]:
        asked.add((domain, block, num))
        return [SimpleNamespace(prompt=f"t{20 + i} t{40 + i}") for i in range(num)]

    mine = replace(FAMILIES["tiny"], models=lambda: (pair.target, pair.draft), requests=requests)
    monkeypatch.setitem(FAMILIES, "tiny", mine)
    sizes = {
        "domains": ["sql"], "served_requests": 6, "answer_tokens": 24, "temperatures": (0.0,),
        "depth": 3,
    }  # fmt: skip
    rows = list(pools._steps(sizes, [pair.draft, pair.target]))
    assert asked == {("sql", FIRST_SERVED, 6)}
    brought = {(row["arm"], row["num"]): np.mean(row["tokens_per_step"]) for row in rows}
    assert brought[pools.POOL, 1] == brought[pools.FIRST, 1] < brought[pools.FIRST, 2]
    assert brought[pools.FIRST, 2] < brought[pools.POOL, 2]
