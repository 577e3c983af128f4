"""The bound on traces in the public simulator's format, beside its arithmetic written out anew."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.oracle import bound, public_traces
from benchmarks.record import Options, read_rows
from osd.errors import ConfigError
from osd.evaluate.bound.published import EAGLE, NGRAM

C_KV, C_TOKEN, C_FIXED, C_AROUND = 3.92645679e-8, 2.10103129e-5, 5.88590713e-3, 1.20683946e-3
D_KV, D_TOKEN, D_FIXED = 2.37768493e-9, 8.41429603e-7, 2.13526175e-3
N_SHARE = 0.005875


def traced(num: int, seed: int) -> list[dict[str, Any]]:
    """Requests whose runs fall by one from token to token until another begins, as real ones do."""
    rng = random.Random(seed)

    def lengths(num_tokens: int, longest: int) -> list[int]:
        found = [1]
        while len(found) < num_tokens:
            found.append(found[-1] - 1 if found[-1] > 1 else 1 + int(longest * rng.random() ** 3))
        return found

    out = []
    for number in range(num):
        num_tokens = rng.randint(5, 60)
        out.append(
            {
                "id": str(number),
                "prompt_token_ids": list(range(rng.randint(3, 90))),
                "acc_eagle": {"acc_len": lengths(num_tokens, 6)},
                # One of the two is known further than the other.
                "acc_ngram": {"acc_len": lengths(num_tokens + number % 3, 20)},
            }
        )
    return out


def written(directory: Path, name: str, requests: Sequence[dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in requests)
    (directory / f"combined_{name}.jsonl").write_text(lines)
    return directory


def simulated_speed(
    one: dict[str, Any], batch: int, proposers: Sequence[str], k: int | None, charged: str
) -> float:
    """The simulator's arithmetic for a batch of one request `batch` times, step by step. `charged`:
    whom the drafts are paid to, or "chosen"."""
    lengths = {name: one[public_traces.FIELDS[name]]["acc_len"] for name in proposers}
    num_tokens = min(map(len, lengths.values()))
    num_prompt = len(one["prompt_token_ids"])

    def verify(in_cache: int, tokens: int) -> float:
        return in_cache * C_KV + tokens * C_TOKEN + C_FIXED

    prefill = verify(0, batch * num_prompt) + C_AROUND
    plain = prefill
    for done in range(1, num_tokens):
        plain += verify(batch * (num_prompt + done), batch) + C_AROUND
    fast, done = prefill, 1
    while done < num_tokens:
        best = max(proposers, key=lambda name: lengths[name][done - 1])
        accepted = lengths[best][done - 1]
        fed = accepted if k is None else k + 1
        in_cache = batch * (num_prompt + done)
        step = verify(in_cache, batch * fed)
        payee = best if charged == "chosen" else charged
        draft = N_SHARE * step if payee == NGRAM else D_KV * in_cache + D_TOKEN * fed + D_FIXED
        fast += step + draft + C_AROUND
        done += min(accepted, fed)
    return plain / fast


def run(directory: Path, traces: Path | None) -> dict[tuple[str, int, str], float]:
    """{(data set, batch, rule): mean over requests} of a quick run."""
    result = bound.run(Options(directory=directory, quick=True, traces=traces))
    assert result.figures
    rows = read_rows(directory)
    return {(row["dataset"], row["batch"], row["rule"]): row["mean"] for row in rows}


def test_as_simulated_it_is_the_simulators_arithmetic(tmp_path: Path) -> None:
    requests = traced(24, seed=1)
    found = run(tmp_path / "out", written(tmp_path / "data", "some", requests))
    both = (NGRAM, EAGLE)
    for batch in bound.QUICK_BATCHES:
        for rule, proposers, k, charged in (
            (bound.SIMULATED, both, None, NGRAM),
            (bound.CHARGED, both, None, "chosen"),
            (bound.EAGLE_SIMULATED, (EAGLE,), None, EAGLE),
            (bound.NGRAM_SIMULATED, (NGRAM,), None, NGRAM),
            ("EAGLE, k = 1", (EAGLE,), 1, EAGLE),
            ("EAGLE, k = 5", (EAGLE,), 5, EAGLE),
        ):
            each = [simulated_speed(one, batch, proposers, k, charged) for one in requests]
            expected = sum(each) / len(each)
            assert found["some", batch, rule] == pytest.approx(expected, rel=1e-9), rule


def test_whom_it_pays_makes_a_difference(tmp_path: Path) -> None:
    found = run(tmp_path / "out", written(tmp_path / "data", "some", traced(24, seed=2)))
    for batch in bound.QUICK_BATCHES:
        simulated, charged, best, eagle = (
            found["some", batch, rule]
            for rule in (bound.SIMULATED, bound.CHARGED, bound.ALL, "EAGLE, oracle length")
        )
        assert simulated > 1.02 * charged, "EAGLE's drafts are paid for"
        assert best > charged, "nobody proposes where it does not pay"
        assert best > eagle
        fixed = [v for (_, b, rule), v in found.items() if b == batch and "k = " in rule]
        assert len(fixed) == bound.LONGEST_FIXED and eagle > max(fixed)


def test_a_known_data_set_is_held_to_what_was_published(tmp_path: Path) -> None:
    traces = written(tmp_path / "data", "gsm8k", traced(8, seed=3))
    written(traces, "unknown", traced(4, seed=4))
    options = Options(directory=tmp_path / "out", quick=True, traces=traces)
    result = bound.run(options)
    verdicts = {figure.group: (figure.value, is_met) for _, figure, is_met in result.verdicts()}
    assert len(verdicts) == 2 * 5, "five rules of gsm8k at two batches"
    rows = read_rows(tmp_path / "out")
    (mean,) = (
        row["mean"]
        for row in rows
        if (row["dataset"], row["batch"], row["rule"]) == ("gsm8k", 16, bound.SIMULATED)
    )
    value, is_met = verdicts[f"gsm8k, batch 16, {bound.SIMULATED}: 2.5 published"]
    assert value == pytest.approx(abs(mean - 2.50)) and is_met == (value <= 0.01)


def test_more_requests_than_the_simulator_takes_are_drawn_as_it_draws(tmp_path: Path) -> None:
    requests = traced(310, seed=5)
    lines = public_traces.read(written(tmp_path / "data", "some", requests))["some"]
    taken = public_traces.simulated(lines, (EAGLE,))
    random.seed(42)
    expected = random.sample(requests, k=300)
    assert [one.num_prompt for one in taken] == [len(o["prompt_token_ids"]) for o in expected]


def test_what_holds_no_traces_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--traces: none given; name data/llama3.1-8B of a clone"
    ):
        run(tmp_path / "out", None)
    with pytest.raises(ConfigError, match=r"holds no combined_\*.jsonl"):
        run(tmp_path / "out", tmp_path)
    broken = written(tmp_path / "data", "some", [*traced(1, seed=6), {"id": "1"}])
    with pytest.raises(ConfigError, match=r"combined_some.jsonl, line 2: no trace of a request"):
        run(tmp_path / "out", broken)


def test_the_command_is_told_where_the_traces_are(tmp_path: Path) -> None:
    traces = written(tmp_path / "data", "some", traced(6, seed=7))
    said: list[str] = []
    out = tmp_path / "out"
    runner.run("bound", quick=True, out=out, traces=traces, say=said.append)
    assert said[0] == "some: 6 requests"
    assert f"not judged: {bound.DISTANCE} <= 0.01" in said[1]
