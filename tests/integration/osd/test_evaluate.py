"""`osd evaluate` on real vLLM: what it says is what vLLM counted, and no arm changes an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

from benchmarks.service import servers
from osd.service.plan import free_port
from tests.support.pairs import Pair, build_pair
from tests.support.paths import ROOT
from tests.support.traffic import prompt_texts

ENGINE = (
    *("serving.vllm.dtype=float32", "serving.vllm.enforce_eager=true"),
    *("serving.vllm.kv_cache_memory_bytes=67108864", "serving.vllm.max_model_len=128"),
    *("serving.env.OMP_NUM_THREADS=1", "serving.env.VLLM_CPU_OMP_THREADS_BIND=nobind"),
)

AT = (70.0, 70.0, 70.01, 70.01, 70.02, 70.02, 70.03, 73.0)
"""When the requests came, in seconds; the last one when the others have long been answered."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def pair(place: Path) -> Pair:
    return build_pair(place / "pair")


@pytest.fixture(scope="module")
def data(place: Path) -> Path:
    texts = prompt_texts(8, seed=5, length=12)
    lines = [
        json.dumps({"prompt": text, "data": f"half {i % 2}", "at": AT[i]})
        for i, text in enumerate(texts)
    ]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    return place / "prompts.jsonl"


def osd_evaluate(place: Path, pair: Pair, data: Path, *more: str) -> str:
    command = [sys.executable, "-m", "osd", "evaluate", str(pair.target), *ENGINE]
    command += ["--draft", str(pair.draft), "--data", str(data), "--out", str(place / "out")]
    command += ["--quick", "--requests", "8", "--max-tokens", "24", "--batch", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(place: Path, pair: Pair, data: Path) -> str:
    more = ("--methods", "none,draft", "--k", "1,3", "--arrivals")
    return osd_evaluate(place, pair, data, *more)


def figures(place: Path, load: str = "batch 3") -> list[dict[str, Any]]:
    found = json.loads((place / "out" / "figures.json").read_text())["figures"]
    return [one for one in found if one["load"] == load]


def runs(place: Path, pattern: str) -> list[dict[str, Any]]:
    found = sorted((place / "out" / "runs").glob(pattern))
    assert found, pattern
    return [json.loads(file.read_text()) for file in found]


def test_no_arm_changes_an_answer(said: str, place: Path) -> None:
    assert "64 compared with those of none at temperature 0: all identical" in said
    none, *others = runs(place, "draft/*.json")
    answers = [one["token_ids"] for one in none["requests"]]
    assert len({tuple(answer) for answer in answers}) == 8 and max(map(len, answers)) == 24
    for other in others:
        assert [one["token_ids"] for one in other["requests"]] == answers


def test_its_counts_are_vllms_own(said: str, place: Path) -> None:
    assert "vLLM's own counters: equal" in said
    for run in runs(place, "draft/draft-k3*.json"):
        parts = [part for one in run["requests"] for part in one["steps"] if part[2]]
        counters = run["counters"]
        assert counters["num_drafts"] == len(parts) > 20
        assert counters["num_draft_tokens"] == sum(len(drafted) for _, _, drafted, _ in parts)
        assert counters["num_accepted_tokens"] == sum(accepted for *_, accepted in parts) > 10
        assert counters["accepted_per_position"] == [
            sum(accepted > g for *_, accepted in parts) for g in range(3)
        ]
    for run in runs(place, "draft/none*.json"):
        assert run["counters"]["num_draft_tokens"] == 0


def test_drafts_and_steps_lead_to_the_answers(said: str, place: Path) -> None:
    """What is kept is enough to walk each answer again."""
    for run in runs(place, "draft/draft-k3*.json"):
        for one in run["requests"]:
            for _, at, drafted, accepted in one["steps"]:
                wanted = one["token_ids"][at : at + accepted]
                assert drafted[: len(wanted)] == wanted
                rejected = one["token_ids"][at + accepted : at + accepted + 1]
                assert drafted[accepted : accepted + 1] != rejected or not rejected


def test_a_draft_that_is_often_right_takes_fewer_steps(said: str, place: Path) -> None:
    by_arm = {(one["method"], one["k"]): one for one in figures(place)}
    none, short, long = by_arm["none", 0], by_arm["draft", 1], by_arm["draft", 3]
    assert 1 < short["acceptance_length"] <= 2 < long["acceptance_length"] <= 4
    assert none["acceptance_length"] is None and none["verified_per_step"] == 1
    assert 3 < long["verified_per_step"] <= 4
    assert long["over_none"]["num"] == 2
    assert long["parts_ms"]["draft"] > short["parts_ms"]["draft"] > none["parts_ms"]["draft"]
    assert 0 < long["target_efficiency"] < 1.5
    assert [of["data"] for of in long["by_data"]] == ["half 0", "half 1"]
    whole = sum(long["parts_ms"].values())
    assert whole == pytest.approx(long["step_ms"]) and min(long["parts_ms"].values()) > 0


def test_requests_come_when_they_were_recorded(said: str, place: Path) -> None:
    """Nobody is served before, and between them the engine rests."""
    for run in runs(place, "draft/*_recorded_*.json"):
        *others, last = run["requests"]
        assert [one["arrived"] for one in run["requests"]] == pytest.approx(
            [at - AT[0] for at in AT]
        )
        assert all(one["arrived"] < one["first_at"] <= one["ended"] for one in run["requests"])
        idle_from = max(one["ended"] for one in others)
        assert idle_from < last["arrived"] < last["ended"] <= run["seconds"]
        assert not [s for s in run["steps"] if idle_from < s["at"] < last["arrived"]]
        assert max(step["batch"] for step in run["steps"]) > 3


def test_latencies_count_from_the_recorded_arrival(said: str, place: Path) -> None:
    (none, *_, long) = figures(place, "recorded")
    for one, slug in ((none, "none"), (long, "draft-k3")):
        found = runs(place, f"draft/{slug}_recorded_*.json")
        served = [each for run in found for each in run["requests"]]
        assert len(served) == 2 * len(AT)
        waited = [each["first_at"] - each["arrived"] for each in served]
        taken = [each["ended"] - each["arrived"] for each in served]
        rest = [
            (each["ended"] - each["first_at"]) / (len(each["token_ids"]) - 1)
            for each in served
            if len(each["token_ids"]) > 1
        ]
        assert one["ttft"]["p50"] == pytest.approx(median_low(waited))
        assert one["latency"]["p50"] == pytest.approx(median_low(taken))
        assert one["tpot"]["p50"] == pytest.approx(median_low(rest))
        assert one["tokens_per_second"] < len(AT) * 24 / (AT[-1] - AT[0])


def test_its_draft_is_replayed_for_wider_trees(said: str, place: Path) -> None:
    """Of one likeliest token it is the acceptance that the engine served with one draft token."""
    assert "draft's k likeliest hold the served token, k = 1 to 5: 0." in said
    found = json.loads((place / "out" / "figures.json").read_text())["successes"]
    assert [one["data"] for one in found] == ["half 0", "half 1", "all data"]
    by_arm = {(one["method"], one["k"]): one for one in figures(place)}
    alpha = by_arm["draft", 1]["acceptance_length"] - 1
    assert found[-1]["by_k"][0] == pytest.approx(alpha, abs=0.15)
    for one in found:
        assert one["by_k"] == sorted(one["by_k"]) and one["by_k"][0] < one["by_k"][-1] < 1
    answers = runs(place, "draft/none*_0.json")[0]["requests"]
    num = sum(len(one["token_ids"]) - 1 for one in answers)
    assert sum(one["num_tokens"] for one in found[:2]) == found[-1]["num_tokens"] == num


@pytest.mark.slow
def test_what_is_there_is_not_done_again_and_more_can_be_added(
    said: str, place: Path, pair: Pair, data: Path
) -> None:
    files = {file: file.stat().st_mtime_ns for file in (place / "out" / "runs").rglob("*.json")}
    methods = "none,ngram,memory,draft,auto"
    again = osd_evaluate(place, pair, data, "--methods", methods, "--k", "1,3", "--repeats", "1")
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert "vLLM's own counters: equal" in again and "all identical" in again
    added = {file.parent.name for file in (place / "out" / "runs").rglob("*.json")}
    assert added == {"draft", "memory", "ngram", "auto"}
    assert [run["k"] for run in runs(place, "auto/*.json")] == [3, 0]
    assert "upper bound, batch 3, temperature 0: " in again and "auto closes " in again


def test_a_bad_start_of_the_engine_is_one_line(place: Path, pair: Pair, data: Path) -> None:
    command = [sys.executable, "-m", "osd", "evaluate", str(pair.target), *ENGINE]
    command += ["--methods", "none", "--data", str(data), "--out", str(place / "bad"), "--quick"]
    command += ["--max-tokens", "8", "serving.vllm.no_such_argument=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "no_such_argument" in done.stderr.splitlines()[-1]
    assert str(place / "bad" / "logs" / "none.log") in done.stderr


BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, whose program looks for a package of vLLM's name on GPUs."""


def as_sharegpt(data: Path, place: Path) -> Path:
    """The same prompts in a form that vLLM reads without pandas."""
    prompts = [json.loads(line)["prompt"] for line in data.read_text().split("\n")]
    turns = [
        [{"from": "human", "value": prompt}, {"from": "gpt", "value": "t30 t31 t32 t33 t34"}]
        for prompt in prompts
    ]
    (place / "sharegpt.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    return place / "sharegpt.json"


@pytest.mark.slow
def test_vllm_bench_serve_counts_the_same(said: str, place: Path, pair: Pair, data: Path) -> None:
    """The same requests to `vllm serve` with the same draft."""
    port = free_port("127.0.0.1")
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 128,
        "enable_prefix_caching": False,
    }
    command = servers.vllm_command(
        pair.target, pair.draft, name="pair", port=port, k=3, options=options
    )
    url, log = f"http://127.0.0.1:{port}", place / "serve.log"
    with servers.process(command, log, {}) as child:
        servers.wait_for_health(child, url, log)
        result = place / "bench.json"
        bench = [sys.executable, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", url]
        bench += ["--model", "pair", "--tokenizer", str(pair.target), "--temperature", "0"]
        bench += ["--dataset-name", "sharegpt", "--dataset-path", str(as_sharegpt(data, place))]
        bench += ["--num-prompts", "8", "--max-concurrency", "3", "--sharegpt-output-len", "24"]
        bench += ["--save-result", "--result-filename", str(result)]
        done = subprocess.run(bench, capture_output=True, text=True, cwd=place)
        assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(result.read_text())
    assert theirs["completed"] == 8
    for run in runs(place, "draft/draft-k3_batch-3*.json"):
        own = run["counters"]
        assert own["num_drafts"] == theirs["spec_decode_num_drafts"]
        assert own["num_draft_tokens"] == theirs["spec_decode_draft_tokens"]
        assert own["num_accepted_tokens"] == theirs["spec_decode_accepted_tokens"]
    osd_evaluate(place, pair, data, "--methods", "none,draft", "--k", "3")  # all runs are there
    long = next(one for one in figures(place) if one["k"] == 3)
    assert long["acceptance_length"] == pytest.approx(theirs["spec_decode_acceptance_length"])
