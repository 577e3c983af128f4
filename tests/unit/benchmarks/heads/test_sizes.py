"""The formulas of `osd bench head_sizes` against numbers worked out by hand or published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.heads import costs, sizes
from benchmarks.heads.costs import Batch
from benchmarks.heads.sizes import DRAFT_VOCAB, SHAPES, protocol, row, run
from benchmarks.record import Options, read_rows
from benchmarks.result import number
from osd.records import TRACE_ARRAYS, Trace
from tests.support.paths import ROOT
from trainer.guard import NUM_WATCHED

LLAMA = SHAPES["8 B"]
HEAD = costs.head_of(LLAMA, DRAFT_VOCAB)
BATCH = Batch(num_traces=8, length=1024, depths=5)


def test_parameters_are_the_published_ones() -> None:
    found = {name: costs.target_parameters(shape) for name, shape in SHAPES.items()}
    assert found["8 B"] == 8_030_261_248
    assert found["70 B"] == 70_553_706_496
    # Qwen3-32B, but for the norms of its queries and keys.
    assert found["32 B"] == 32_762_123_264 - 64 * 2 * 128


def test_a_head_of_an_8b_target() -> None:
    queries, keys_values, output = 4096 * 8192, 2 * 1024 * 8192, 4096 * 4096
    layer = queries + keys_values + output + 3 * 4096 * 14336 + 3 * 4096
    assert costs.parameters(HEAD, "layers.0.") == layer == 243_281_920
    assert costs.parameters(HEAD) == layer + 3 * 4096 * 4096 + 4096 + 32_000 * 4096 == 424_689_664
    assert costs.state_bytes(HEAD) == 16 * 424_689_664
    assert costs.embedding_bytes(LLAMA) == 4 * 128_256 * 4096


def test_flops_of_a_token() -> None:
    attention = 4 * 4096 * 512
    assert costs.attention_flops(LLAMA, 1024) == attention == 8_388_608
    found = costs.recomputation_flops(LLAMA, HEAD, 1024)
    assert found == 29 * (2 * 218_112_000 + attention) == 12_893_765_632
    at_a_depth = 6 * (243_281_920 + 131_072_000) + 3 * attention
    once = 6 * 3 * 4096 * 4096
    assert costs.training_flops(LLAMA, HEAD, BATCH) == 5 * at_a_depth + once == 11_658_436_608


def test_bytes_of_a_step() -> None:
    tokens = 8 * 1024
    of_target = tokens * 3 * 4096 * (2 + 2 + 4)
    assert costs.target_activation_bytes(LLAMA, BATCH) == of_target == 805_306_368
    numbers = 12 * 4096 + 3 * 14336 + 3 * (32_000 + 32 * 1024)
    of_head = 5 * tokens * 4 * numbers
    assert costs.head_activation_bytes(LLAMA, HEAD, BATCH) == of_head == 46_934_261_760
    held = 16 * 424_689_664 + 4 * 128_256 * 4096
    assert costs.trainer_bytes(LLAMA, HEAD, BATCH, has_target=False) == held + of_head
    gate = 2 * (4 * 424_689_664 + 4 * 128_256 * 4096)
    single = Batch(num_traces=1, length=1024, depths=5)
    assert of_head // 8 < gate == costs.gate_bytes(LLAMA, HEAD)
    assert costs.trainer_bytes(LLAMA, HEAD, single, has_target=False) == held + gate
    whole = costs.trainer_bytes(LLAMA, HEAD, BATCH)
    assert whole == held + of_head + 2 * 8_030_261_248


def test_bytes_of_a_token() -> None:
    assert costs.feature_bytes(LLAMA) == 24 * 1024
    assert costs.feature_bytes(LLAMA, with_last=True) == 32 * 1024
    assert costs.trace_bytes(64) == 409


def test_bytes_of_a_trace_are_those_of_its_arrays() -> None:
    num, top_k = 10, 64
    ids = np.arange(num)
    trace = Trace(
        trace_id="t",
        target_id="x",
        finished_at=0.0,
        prompt_ids=ids[:1],
        output_ids=ids[1:],
        position=ids[1:],
        kind=np.ones(9),
        draft_ids=ids[1:],
        target_ids=np.tile(np.arange(top_k), (9, 1)),
        target_logprobs=np.full((9, top_k), -5.0),
        tail_logprob=np.full(9, -1.0),
        keep_prob=np.ones(9),
        draft_version=np.ones(9),
    )
    held = sum(getattr(trace, name).nbytes for name in TRACE_ARRAYS)
    assert held - trace.prompt_ids.nbytes == 9 * costs.trace_bytes(top_k)


def test_a_round_is_that_of_the_configuration(tmp_path: Path) -> None:
    plan = protocol(Options(directory=tmp_path))
    assert sizes.NUM_WATCHED == NUM_WATCHED
    found = row(LLAMA, plan)
    learnt, judged, rate = 32 * 9, 24 + 64, 0.4 * 989e12
    flops = 1024 * (learnt * (12_893_765_632 + 11_658_436_608) + judged * 12_893_765_632)
    assert found["smallest round"] == pytest.approx(flops / rate)
    assert found["smallest round"] == pytest.approx(21.2, abs=0.1)
    assert found["features of the smallest round"] == learnt * 1024 * 24 * 1024
    assert found["traces that the cache holds"] == pytest.approx(2**30 / (1024 * 24 * 1024))
    assert found["stored features"] == 20_000 * 1024 * 24 * 1024


def test_a_store_that_keeps_up_reads_as_fast_as_the_target_computes(tmp_path: Path) -> None:
    found = row(LLAMA, protocol(Options(directory=tmp_path)))
    seconds = found["recomputation"] / (0.4 * 989e12)
    assert found["store that keeps up"] * seconds == pytest.approx(found["features"])


def test_tides_bytes_are_this_formulas() -> None:
    """16.9 KiB a token for 3 layers of 2880 (arXiv 2602.05145)."""
    shape = replace(LLAMA, hidden_size=2880)
    assert costs.feature_bytes(shape) / 1024 == pytest.approx(16.9, abs=0.05)


def test_the_table_in_the_docs_is_the_benchs(tmp_path: Path) -> None:
    figures = run(Options(directory=tmp_path)).figures
    page = (ROOT / "docs" / "heads.md").read_text()
    for name in {figure.name for figure in figures}:
        cells = [f"{number(f.value)} {f.unit}".strip() for f in figures if f.name == name]
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_every_target_is_in_the_table(tmp_path: Path) -> None:
    result = run(Options(directory=tmp_path))
    assert [found["target"] for found in read_rows(tmp_path)] == list(SHAPES)
    value = {(f.group, f.name): (round(f.value, 1), f.unit) for f in result.figures}
    assert value["70 B", "features"] == (48.0, "KiB/token")
    assert value["70 B", "target in bf16"] == (141.1, "GB")
    assert value["32 B", "head parameters"] == (782.5, "M")
