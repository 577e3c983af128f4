"""The benches' arithmetic on known numbers, and their figures from a small recorded run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import BENCHES, plot, runner
from benchmarks.record import Goal, Notebook, Options, Protocol, Shape, read_rows
from benchmarks.result import Figure, Lines, Result, Spread, number, table
from benchmarks.stats import Estimate, estimate, median_ratio, quantile
from osd.errors import ConfigError
from tests.support.paths import ROOT

RECORDED = Path(__file__).parent / "recorded"
"""Raw rows of quick runs, shortened."""


def a_protocol(*goals: Goal) -> Protocol:
    return Protocol(
        bench="some",
        question="Is it?",
        arms=("a", "b"),
        order="in turns",
        sizes={"k": 4},
        goals=goals,
    )


def bench(name: str) -> ModuleType:
    """Its module."""
    module, _ = BENCHES[name]
    return importlib.import_module(f"benchmarks.{module}")


# -- statistics -----------------------------------------------------------------------------------


def test_a_median_ratio_pairs_neighbours() -> None:
    # The machine becomes four times slower half-way: the ratio of neighbours does not notice, that
    # of medians would.
    slow = np.repeat([1.0, 4.0], 20)
    found = median_ratio(0.9 * slow, slow)
    assert found.n == 40
    assert found.value == pytest.approx(0.9)
    assert (found.low, found.high) == (pytest.approx(0.9), pytest.approx(0.9))


def test_a_median_ratio_survives_outliers() -> None:
    off = np.ones(31)
    on = np.r_[np.full(25, 0.98), np.full(6, 0.2)]
    assert median_ratio(on, off).value == pytest.approx(0.98)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        found = estimate(rng.normal(1.0, 0.1, 25))
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 200 <= 0.99


def test_the_same_values_give_the_same_interval() -> None:
    values = np.random.default_rng(1).random(30)
    assert estimate(values) == estimate(values)


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="2 numerators and 1 denominators"):
        median_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_p99_of_few_values_is_the_largest() -> None:
    assert quantile(list(range(1, 13)), 0.99) == 12
    assert quantile(list(range(1, 201)), 0.99) == 198
    assert quantile([1, 2, 3, 4], 0.5) == 2


# -- results --------------------------------------------------------------------------------------


def test_a_goal_is_held_against_the_number_it_names() -> None:
    goal = Goal(figure="speed", bound="low", at_least=0.98)
    result = Result(
        protocol=a_protocol(goal),
        figures=(
            Figure(group="one", name="speed", value=0.99, low=0.985, high=1.0),
            Figure(group="two", name="speed", value=0.99, low=0.97, high=1.0),
            Figure(group="two", name="other", value=0.0),
        ),
    )
    assert [(f.group, is_met) for _, f, is_met in result.verdicts()] == [
        ("one", True),
        ("two", False),
    ]
    text = table(result)
    assert text.count("lower bound >= 0.98: met") == 1
    assert text.count("lower bound >= 0.98: MISSED") == 1
    assert result.as_dict()["goals"][1] == {
        "group": "two",
        "figure": "speed",
        "goal": "lower bound >= 0.98",
        "met": False,
    }


def test_a_goal_that_could_not_be_judged_is_said() -> None:
    goals = Goal(figure="speed", bound="low", at_least=0.98), Goal(figure="harm", at_most=0.0)
    found = Result(
        protocol=a_protocol(*goals), figures=(Figure(group="one", name="speed", value=0.99),)
    )
    assert found.verdicts() == []
    assert table(found).splitlines()[-2:] == [
        "not judged: one, speed lower bound >= 0.98",
        "not judged: harm <= 0",
    ]
    assert [(g["group"], g["met"]) for g in found.as_dict()["goals"]] == [("one", None), ("", None)]


def test_a_shape_is_seen_where_the_whole_interval_says_so() -> None:
    shape = Shape(figure="fall", says="it falls", above=0.5)
    ends = {
        "seen": (0.6, 0.9),
        "not seen": (0.1, 0.5),
        "inconclusive": (0.4, 0.6),
        "no interval": (None, None),
    }
    figures = [
        Figure(group=group, name="fall", value=0.5, low=low, high=high)
        for group, (low, high) in ends.items()
    ]
    figures.append(Figure(group="other", name="rise", value=1.0, low=1.0, high=1.0))
    found = Result(protocol=replace(a_protocol(), shapes=(shape,)), figures=tuple(figures))
    expected = [*list(ends)[:3], "inconclusive"]
    assert [verdict for _, _, verdict in found.seen()] == expected
    assert [one["verdict"] for one in found.as_dict()["shapes"]] == expected
    assert [
        line.partition("it falls: ")[2] for line in table(found).splitlines()[2:9:2]
    ] == expected


def test_a_shape_that_nothing_was_measured_of_is_inconclusive() -> None:
    shape = Shape(figure="fall", says="it falls", above=0.5)
    found = Result(protocol=replace(a_protocol(), shapes=(shape,)), figures=())
    assert table(found).splitlines()[-1] == "not judged: it falls"
    assert [one["verdict"] for one in found.as_dict()["shapes"]] == ["inconclusive"]


def test_a_single_observation_has_no_interval_and_meets_no_bound() -> None:
    """Resampled again and again it is always itself, which would pass for certainty."""
    plan = replace(
        a_protocol(Goal(figure="speed", bound="low", at_least=0.98)),
        shapes=(Shape(figure="speed", says="it is fast", above=0.98),),
    )
    for values, met, verdict in (([1.0], [], "inconclusive"), ([1.0, 1.1], [True], "seen")):
        figure = Figure.of("one", "speed", estimate(values))
        found = Result(protocol=plan, figures=(figure,))
        assert [is_met for _, _, is_met in found.verdicts()] == met
        assert [said for _, _, said in found.seen()] == [verdict]
        assert bool(found.unjudged()) == (not met)


def test_numbers_are_short() -> None:
    assert [number(x) for x in (0.98765, 12.3456, 151_936.4, 0.0)] == [
        "0.9877",
        "12.35",
        "151,936",
        "0",
    ]


def test_drawings_are_well_formed_and_show_every_observation() -> None:
    spread = Spread(
        title="a < b",
        unit="ms",
        rows=(("x & y", Estimate(value=1, low=0.5, high=2, n=3), (0.5, 1.0, 2.0)),),
        reference=1,
    )
    lines = Lines(
        title="t",
        x_label="x",
        y_label="y",
        lines={"one": ((0.0, 1.0), (1.0, 1.0)), "two": ((0.5, 3.0),)},
    )
    circles = list(ElementTree.fromstring(plot.draw(spread)).iter("circle"))
    assert len(circles) == 4
    chart = json.loads(ElementTree.fromstring(plot.draw(lines)).findtext("script") or "")
    assert chart["x"] == [0.0, 0.5, 1.0]
    assert {line["label"]: line["values"] for line in chart["lines"]} == {
        "one": [1.0, None, 1.0],
        "two": [None, 3.0, None],
    }
    page = plot.page(Result(protocol=a_protocol(), figures=(), drawings=(spread,)), {"cpu": "some"})
    assert "a &lt; b" in page and "x &amp; y" in page
    assert "Is it?" in page


# -- files ----------------------------------------------------------------------------------------


def test_the_protocol_is_on_disk_before_anything_is_measured(tmp_path: Path) -> None:
    notebook = Notebook(
        Options(directory=tmp_path, quick=True), a_protocol(Goal(figure="f", at_most=1.0))
    )
    head = json.loads((tmp_path / "protocol.json").read_text())
    assert head["protocol"]["sizes"] == {"k": 4}
    assert head["protocol"]["goals"][0]["at_most"] == 1.0
    assert head["quick"] is True
    assert {"date", "cpu", "num_cores", "memory_gib", "versions", "load_average"} <= set(
        head["machine"]
    )
    assert head["machine"]["versions"]["torch"]
    assert read_rows(tmp_path) == []
    notebook.add(arm="a", seconds=1.5)
    assert read_rows(tmp_path) == notebook.rows == [{"arm": "a", "seconds": 1.5}]


def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    code = (
        "import numpy as np\nfrom osd.common import machine\n"
        "before = machine.memory()['anonymous']\nheld = np.ones(8 << 20)\n"
        "print((machine.memory()['anonymous'] - before) / held.nbytes)"
    )
    # In a process of its own: one that ran much else may hold the room already.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert float(done.stdout) > 0.9, done.stderr


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out .*file/x"):
        runner.run("buffer", quick=True, out=tmp_path / "file" / "x", say=print)


def test_two_runs_do_not_write_to_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(options: Options) -> Result:
        with pytest.raises(ConfigError, match=f"--out {tmp_path}: another run writes there"):
            runner.run("buffer", quick=True, out=tmp_path, say=print)
        return Result(protocol=a_protocol(), figures=())

    monkeypatch.setattr(bench("buffer"), "run", again)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    runner.run("buffer", quick=True, out=tmp_path, say=print)
    assert (tmp_path / "result.json").exists(), "and the first goes on"


# -- commands -------------------------------------------------------------------------------------


def test_help_lists_the_benches_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from osd.cli import app\n"
        "print(CliRunner().invoke(app, ['bench', '--help']).output)\n"
        "print([m for m in ('torch', 'vllm', 'ray', 'transformers', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip().endswith("[]")
    for name in BENCHES:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_a_module_with_a_run(name: str) -> None:
    assert callable(bench(name).run)


# -- each bench on recorded rows ------------------------------------------------------------------


def recorded(name: str) -> tuple[Result, dict[tuple[str, str], Figure], list[dict[str, Any]]]:
    """The result of a bench from recorded rows, its figures by group and name, and the rows."""
    module = bench(name)
    rows = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    result: Result = module.summarise(
        module.protocol(Options(directory=Path("unused"), quick=True)), rows
    )
    json.dumps(result.as_dict(), allow_nan=False)
    for drawing in result.drawings:
        ElementTree.fromstring(plot.draw(drawing))
    return result, {(f.group, f.name): f for f in result.figures}, rows


def test_capture_from_recorded_rows() -> None:
    result, figures, rows = recorded("capture")
    group = "512 tokens, batch 8"
    on, off = (
        [r for r in rows if r["group"] == "tiny/8" and r["arm"] == arm] for arm in ("on", "off")
    )
    # What is left to do after a burst is charged to capture.
    charged = [a["seconds"] + a["backlog_s"] for a in on]
    ratio = np.median([b["seconds"] / a for a, b in zip(charged, off, strict=True)])
    assert figures[group, "tokens/s, on / off"].value == pytest.approx(ratio)
    hot = np.median([1e6 * r["hook_cpu_s"] / r["num_tokens"] for r in on])
    assert figures[group, "CPU in the hot path per output token"].value == pytest.approx(hot)
    num_rows = sum(r["sent"]["rows"] for r in on)
    assert figures[group, "bytes per stored row"].value == pytest.approx(
        sum(r["sent"]["bytes"] for r in on) / num_rows
    )
    assert figures[group, "rows stored per output token"].value == num_rows / sum(
        r["num_tokens"] for r in on
    )
    assert [f.group for _, f, _ in result.verdicts()] == [group, "151,936 tokens, batch 8"]


def test_swap_from_recorded_rows() -> None:
    _, figures, rows = recorded("swap")
    ours, theirs = ([r for r in rows if r["arm"] == arm] for arm in ("ours", "vllm"))
    longest = [max(r["blocked_s"] for r in arm) for arm in (ours, theirs)]
    assert figures["tiny", "blocked p99, ours"].value == pytest.approx(1e3 * longest[0])
    assert figures["tiny", "blocked p99, ours / vLLM's"].value == pytest.approx(
        longest[0] / longest[1]
    )
    excess = max(max(r["gaps_s"]) - r["quiet_s"] for r in ours)
    assert figures["tiny", "inter-token excess p99, ours"].value == pytest.approx(1e3 * excess)
    assert figures["tiny", "target unchanged (1 = yes)"].value == 1
    assert figures["tiny", "memory held besides vLLM's"].value < 64
    (end,) = (r for r in rows if r["arm"] == "engine")
    assert figures["tiny", "blocked by the proof, of ours"].value == pytest.approx(
        1e3 * np.median(end["proof_s"])
    )


def test_buffer_from_recorded_rows() -> None:
    _, figures, rows = recorded("buffer")
    title = "short traces (64 + 64 tokens)"
    mine = [r for r in rows if r["group"] == "short"]
    speeds = [r["read"]["num_traces"] * r["trace_bytes"] / 1e6 / r["read"]["seconds"] for r in mine]
    assert figures[title, "out"].value == pytest.approx(np.median(speeds))
    per_trace = figures[title, "bytes per trace, in the server"].value
    assert per_trace == sum(r["stored"]["num_bytes"] for r in mine) / sum(
        r["stored"]["num_traces"] for r in mine
    )
    minutes = figures[title, "traffic per GB at 1,000 tokens/s"].value
    assert minutes * 60 * 1000 * per_trace / 64 == pytest.approx(1e9)


def test_serving_from_recorded_rows() -> None:
    result, figures, rows = recorded("serving")
    by_arm = {
        arm: [r for r in rows if r["group"] == "8 streams" and r["arm"] == arm]
        for arm in ("bare", "idle")
    }
    speeds = {
        a: [sum(q["tokens"] for q in r["requests"]) / r["seconds"] for r in rs]
        for a, rs in by_arm.items()
    }
    ratio = np.median([a / b for a, b in zip(speeds["idle"], speeds["bare"], strict=True)])
    assert figures["8 streams", "tokens/s, idle / bare"].value == pytest.approx(ratio)
    longest = max(q["seconds"] for r in by_arm["idle"] for q in r["requests"])
    assert figures["8 streams", "request latency p99, idle"].value == pytest.approx(1e3 * longest)
    assert figures["8 streams", "answers that differ from bare vLLM's"].value == 0
    looks = "looks that saw a training round"
    assert {f.name for _, f, _ in result.verdicts()} == {
        "tokens/s, idle / bare",
        "TPOT, idle / bare",
        looks,
    }


def test_the_service_of_the_serving_bench_never_rests_from_training() -> None:
    from benchmarks.service import serving
    from osd.config.reading import load

    config = load(serving.PRESET, serving._overrides("t", "d", "data"), environ={}).config
    assert (config.trainer.patience_rounds, config.trainer.min_new_traces) == (0, 1)


def test_the_vllm_beside_the_service_gets_the_same_options() -> None:
    from benchmarks.service.servers import vllm_command

    options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 32}
    command = vllm_command(Path("t"), Path("d"), name="tiny", port=7, k=4, options=options)
    assert command[command.index("--max-num-seqs") + 1] == "32"
    assert "--enforce-eager" in command
    assert "--no-enable-prefix-caching" in command
    speculation = json.loads(command[command.index("--speculative-config") + 1])
    assert speculation == {"method": "draft_model", "model": "d", "num_speculative_tokens": 4}


def test_changes_compare_auto_with_the_fixed_choice_that_was_best_then() -> None:
    from benchmarks.control import changes

    plan = changes.protocol(Options(directory=Path("unused"), quick=True))
    (name, *_) = plan.sizes["changes"]
    speeds = dict.fromkeys(plan.arms, 50.0) | {"k = 3": 80.0, "auto": 76.0}
    rows = [
        {"group": name, "arm": arm, "repeat": repeat, "seconds": 2.0, "num_tokens": 2 * speed}
        for repeat in range(4)
        for arm, speed in speeds.items()
    ]
    rows.append(
        {"group": name, "arm": changes.DURING, "repeat": 0, "seconds": 10.0, "num_tokens": 600}
    )
    figures = {(f.group, f.name): f.value for f in changes.summarise(plan, rows).figures}
    assert figures[name, changes.BEST] == pytest.approx(76 / 80)
    assert figures[name, changes.DURING] == pytest.approx(60 / 80)


def test_control_is_held_against_what_could_have_been_fixed() -> None:
    """Per cell, for all cells, and against a table of k by batch; here `auto` always finds the
    cell's best."""
    from benchmarks.control import control

    plan = control.protocol(Options(directory=Path("unused")))
    speeds = {
        "good": {"k = 0": 10.0, "k = 1": 15.0, "k = 3": 30.0, "k = 5": 40.0, "memory, 8": 10.0},
        "middling": {"k = 0": 10.0, "k = 1": 20.0, "k = 3": 15.0, "k = 5": 10.0, "memory, 8": 10.0},
        "useless": {"k = 0": 10.0, "k = 1": 8.0, "k = 3": 6.0, "k = 5": 5.0, "memory, 8": 9.0},
    }

    def row(group: str, arm: str, repeat: int, speed: float, **more: Any) -> dict[str, Any]:
        return {
            "group": group,
            "arm": arm,
            "repeat": repeat,
            "seconds": 2.0,
            "cpu_seconds": 1.0 if arm == "auto" else 1.02,
            "num_tokens": 2 * speed,
            **more,
        }

    rows = []
    for draft, fixed in speeds.items():
        for load in plan.sizes["loads"]:
            slower = {arm: fixed[arm] / 2 for arm in ("k = 3", "k = 5") if load == "16 streams"}
            arms = fixed | slower
            arms |= {"auto": max(arms.values()), "no speculation": 10.0}
            rows += [
                row(f"{draft} draft, {load}", arm, i, speed)
                for i in range(4)
                for arm, speed in arms.items()
            ]
    rows += [row(control.COST_GROUP, control.STATIC, i, 100.0) for i in range(4)]
    rows += [row(control.COST_GROUP, control.CONTROLLED, i, 99.0) for i in range(4)]
    figures = {(f.group, f.name): f.value for f in control.summarise(plan, rows).figures}
    assert figures[control.ALL, control.MEAN_BEST] == pytest.approx(1.0)
    assert figures["useless draft, 4 streams", control.BEST] == pytest.approx(1.0)
    assert figures["useless draft, 4 streams", control.CPU] == pytest.approx(1 / 1.02)
    assert figures[control.ALL, control.EITHER] == 1.0
    assert _share_of_cells(plan, rows, slower=1.2, cpu=1.02) == 1.0
    assert _share_of_cells(plan, rows, slower=1.05, cpu=1.1) == 1.0
    assert _share_of_cells(plan, rows, slower=1.2, cpu=1.1) == 11 / 12
    assert figures["good draft, 4 streams", control.OVER_NONE] == pytest.approx(4.0)
    best, best_of_16 = 40 * 20 * 10, 20 * 20 * 10
    # The best single choice, and the table's for 1 or 4 streams.
    always_1, always_3 = 15 * 20 * 8, 30 * 15 * 6
    single = (best / always_1) ** 3 * best_of_16 / always_1
    over_table = (best / always_3) ** 2 * best_of_16 / always_1
    assert figures[control.ALL, control.MEAN_SINGLE] == pytest.approx(single ** (1 / 12))
    assert figures[control.ALL, control.MEAN_TABLE] == pytest.approx(over_table ** (1 / 9))
    assert figures[control.COST_GROUP, control.COST] == pytest.approx(0.99)


def _share_of_cells(plan: Any, rows: list[dict[str, Any]], *, slower: float, cpu: float) -> float:
    """Where `auto` takes so many times the time and the CPU time in one cell."""
    from benchmarks.control import control

    def changed(row: dict[str, Any]) -> dict[str, Any]:
        if (row["group"], row["arm"]) != ("good draft, 1 stream", control.AUTO):
            return row
        return row | {
            "seconds": row["seconds"] * slower,
            "cpu_seconds": 1.02 * cpu,
        }

    found = control.summarise(plan, [changed(row) for row in rows]).figures
    return next(figure.value for figure in found if figure.name == control.EITHER)


def test_engines_that_schedule_asynchronously_are_offered_no_memory() -> None:
    from benchmarks.control import control

    options = Options(directory=Path("unused"))
    sync, asynchronous = (control.protocol(options, is_async=each) for each in (False, True))
    assert set(sync.arms) - set(asynchronous.arms) == {"memory, 8"}
    assert asynchronous.sizes["scheduling"] == "asynchronous"
