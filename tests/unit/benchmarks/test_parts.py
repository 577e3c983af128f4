"""A part of a bench, and a run that goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks import IN_PARTS
from benchmarks.cli import app
from benchmarks.drift import jobs, memory, names
from benchmarks.learning import drafts, online, online_report, payback, where_it_pays
from benchmarks.parts import Asked, measured, narrowed
from benchmarks.record import Notebook, Options, Protocol, Row, read_rows
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.step_times import DRAFT, STREAMS, WIDTHS
from benchmarks.traffic.family import Family
from benchmarks.traffic.schedule import Schedule
from osd.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.services import wait_until
from tests.unit.benchmarks.test_runner import bench


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as found:
        yield found


def part(directory: Path, *only: str) -> tuple[Options, Protocol]:
    options = Options(directory=directory, only=only)
    return options, narrowed(where_it_pays.protocol(options), options)


def counted(calls: list[int], number: int) -> Row:
    calls.append(number)
    return {"value": number * 10, "number": "as the replay has it"}


def asked(calls: list[int], *numbers: int) -> list[Asked]:
    return [Asked({"number": one}, partial(counted, calls, one)) for one in numbers]


def silent(text: str) -> None:
    pass


@pytest.mark.parametrize("name", IN_PARTS)
def test_every_list_that_can_be_cut_is_there(name: str, tmp_path: Path) -> None:
    options = Options(directory=tmp_path)
    plan = bench(name).protocol(options)
    lists = {"arms": plan.arms, **plan.sizes}
    for part_of in IN_PARTS[name]:
        first = str(next(iter(lists[part_of])))
        given = Options(directory=tmp_path, only=(f"{part_of}={first}",))
        cut = narrowed(plan, given)
        found = {"arms": cut.arms, **cut.sizes}
        assert [str(one) for one in found[part_of]] == [first]
        assert {k: v for k, v in found.items() if k != part_of} == {
            k: v for k, v in lists.items() if k != part_of
        }
    assert narrowed(plan, options) == plan


@pytest.mark.parametrize("name", IN_PARTS)
def test_the_example_of_a_bench_can_be_run(name: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, [name, "--help"]).output
    (only,) = re.findall(r"Example:  osd bench \w+ --only (\S+) --out run", said)
    options = Options(directory=tmp_path, only=(only,))
    assert narrowed(bench(name).protocol(options), options) != bench(name).protocol(options)


def test_a_part_is_all_that_is_asked_for(tmp_path: Path) -> None:
    _, plan = part(tmp_path, "temperatures=0.3", "seeds=0", "seeds=2", "shares=0.14")
    assert {(t, seed) for t, seed, _, _ in where_it_pays._runs(plan)} == {(0.3, 0), (0.3, 2)}
    assert {share for _, _, _, share in where_it_pays._runs(plan)} == {None, 0.14}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ("seeds", "--only seeds: must be NAME=VALUE, where NAME is arms or temperatures or"),
        ("streams=4", "--only streams=4: must be NAME=VALUE, where NAME is arms or"),
        ("seeds=7", "--only seeds=7: must be one of 0; 1; 2"),
        ("temperatures=0.30", "--only temperatures=0.30: must be one of 0.3; 0.5; 0.7"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(only: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        part(tmp_path, only)
    assert str(refused.value).startswith(said)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_where_it_was_left(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    calls: list[int] = []
    options, plan = part(tmp_path, "seeds=0")
    first = measured(pool, Notebook(options, plan), asked(calls, 3, 1), silent, at_once=1)
    assert first == [{"value": 30, "number": 3}, {"value": 10, "number": 1}]
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write('{"number": 2, "val')  # killed while it wrote
    options, whole = part(tmp_path)
    again = measured(pool, Notebook(options, whole), asked(calls, 1, 2, 3), silent, at_once=1)
    assert [row["number"] for row in again] == [1, 2, 3]
    assert calls == [3, 1, 2], "nothing is measured twice"
    assert read_rows(tmp_path) == [*first, again[1]]
    assert json.loads((tmp_path / "protocol.json").read_text())["protocol"]["sizes"]["seeds"] == [
        *(0, 1, 2)
    ]


def files_of(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("name", "quick", "differing"),
    [("where_it_pays", True, "quick"), ("payback", False, "bench"), ("control", False, "bench")],
)
def test_another_run_that_took_hours_is_left_alone(
    name: str, quick: bool, differing: str, tmp_path: Path
) -> None:
    options, plan = part(tmp_path)
    Notebook(options, plan).add(number=1)
    before = files_of(tmp_path)
    other = Options(directory=tmp_path, quick=quick)
    said = f"{tmp_path}: holds another run, which differs in {differing}; choose another"
    with pytest.raises(ConfigError, match=said):
        Notebook(other, bench(name).protocol(other))
    assert before == files_of(tmp_path)


def test_nor_does_one_that_took_hours_overwrite_another(tmp_path: Path) -> None:
    options, plan = part(tmp_path)
    Notebook(options, bench("control").protocol(options)).add(number=1)
    with pytest.raises(ConfigError, match="differs in bench"):
        Notebook(options, plan)
    assert read_rows(tmp_path) == [{"number": 1}]


def test_all_sizes_but_what_is_cut_must_be_the_same(tmp_path: Path) -> None:
    options = Options(directory=tmp_path)
    plan = payback.protocol(options)
    some = {name: plan.sizes["schedules"][name] for name in ("sharp", "smooth")}
    one = replace(plan, sizes={**plan.sizes, "schedules": some})
    Notebook(options, one).add(number=1)
    longer = {"family": "tiny", "phases": []}
    both = {"sharp": some["sharp"], "smooth": longer, "natural": longer}
    for sizes, differing in (({"schedules": both}, "schedules.smooth"), ({"k_max": 1}, "k_max")):
        with pytest.raises(ConfigError, match=f"differs in {differing};"):
            Notebook(options, replace(plan, sizes={**plan.sizes, **sizes}))
    assert Notebook(options, plan).rows == [{"number": 1}]


@pytest.mark.parametrize("text", [None, "", '{"protocol": {"bench": "whe', "[]", '{"sizes": 4}'])
def test_rows_that_nobody_knows_the_run_of_are_left_alone(text: str | None, tmp_path: Path) -> None:
    options, plan = part(tmp_path)
    Notebook(options, plan).add(number=1)
    (tmp_path / "protocol.json").unlink()
    if text is not None:
        (tmp_path / "protocol.json").write_text(text)
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match="protocol.json: does not say which run the rows of raw"):
        Notebook(options, plan)
    assert before == files_of(tmp_path)


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    options, plan = part(tmp_path)
    Notebook(options, plan).add(number=1)
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write("\0\0\n")
    with pytest.raises(ConfigError, match="raw.jsonl: line 2 is not JSON; take it out"):
        Notebook(options, plan)


def test_nothing_measured_is_nothing_to_keep(tmp_path: Path) -> None:
    options, plan = part(tmp_path)
    Notebook(options, plan)
    (tmp_path / "protocol.json").write_text("{")
    assert Notebook(options, payback.protocol(options)).rows == []


def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    calls: list[int] = []
    options, plan = part(tmp_path)

    def failing() -> Row:
        raise OSError("no room")

    given = [*asked(calls, 1), Asked({"number": 2}, failing), *asked(calls, *range(3, 40))]
    with pytest.raises(OSError, match="no room"):
        measured(pool, Notebook(options, plan), given, silent, at_once=2)
    assert [row["number"] for row in read_rows(tmp_path)] == calls
    assert calls == [1, 3], "what was begun is kept, the rest is not begun"


def test_a_part_of_which_nothing_is_left_is_refused(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    options, plan = part(tmp_path)
    with pytest.raises(ConfigError, match="--only: leaves nothing to be measured"):
        measured(pool, Notebook(options, plan), [], silent, at_once=1)


ENDLESS = """
import os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from benchmarks.drift.jobs import prepare
from benchmarks.parts import Asked, measured
from benchmarks.record import Notebook, Options, Protocol

def row(begun):
    with TemporaryDirectory(dir=begun.parent, prefix="held-"):
        begun.write_text(str(os.getpid()))
        time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    directory = Path(sys.argv[1])
    plan = Protocol(bench="payback", question="", arms=(), order="", sizes={})
    asked = [Asked({"n": n}, partial(row, directory / f"pid-{n}")) for n in range(4)]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=prepare) as pool:
        measured(pool, Notebook(Options(directory=directory), plan), asked, print, at_once=1)
"""


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_outlives_a_run_that_is_ended(
    how: signal.Signals, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    # As a shell starts what it does not wait for: Ctrl-C is ignored.
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, script, tmp_path]
    run = subprocess.Popen(command, env=environ)
    begun = tmp_path / "pid-0"
    wait_until(lambda: begun.exists() and begun.read_text(), 60, "a row is begun")
    run.send_signal(how)
    assert run.wait(20) == status
    worker = int(begun.read_text())
    wait_until(lambda: not psutil.pid_exists(worker), 20, "the process of the pool ends")
    assert not (tmp_path / "pid-1").exists(), "no other row is begun"
    assert how == signal.SIGKILL or not list(tmp_path.glob("held-*")), "nothing is left behind"


def test_times_of_steps_that_were_cut_off_are_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, plan = part(tmp_path)
    notebook = Notebook(options, plan)
    whole = [
        {"batch": STREAMS, "arm": arm, "step_s": 0.1}
        for _ in range(2)
        for arm in (*map(str, WIDTHS), DRAFT)
    ]
    notebook.add(**{**whole[0], "step_s": 9.0})
    monkeypatch.setattr(jobs, "measure", lambda cycles: whole)
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    assert jobs.step_times(notebook, 2, silent) == whole
    monkeypatch.setattr(jobs, "measure", lambda cycles: 1 / 0)
    assert jobs.step_times(notebook, 2, silent) == whole, "and once there, they are kept"


def test_a_bench_that_is_no_hours_long_begins_anew(tmp_path: Path) -> None:
    options = Options(directory=tmp_path)
    plan = bench("control").protocol(options)
    Notebook(options, plan).add(value=1)
    assert Notebook(options, plan).rows == []
    assert (tmp_path / "raw.jsonl").read_text() == ""


def test_all_that_the_parts_replay_is_recorded_beforehand(tmp_path: Path) -> None:
    options = Options(directory=tmp_path, only=("seeds=1", "families=prose-2M-0%"))
    plan = narrowed(drafts.protocol(options), options)
    assert drafts._streams(plan) == [
        *(("prose", "en", 2, 192), ("prose", "de", 2, 384)),
        *(("prose", "en", 0, 192), ("prose", "de", 0, 192)),
    ]
    options = Options(directory=tmp_path, only=("seeds=0", "models=prose", "schedules=home-and-de"))
    plan = narrowed(online.protocol(options), options)
    streams = online._streams(list(online._runs(plan)))
    assert {(family, domain) for family, domain, _, _ in streams} == {
        ("prose", "en"),
        ("prose", "de"),
    }


def test_a_schedule_of_other_models_is_replayed_under_its_own(tmp_path: Path) -> None:
    options = Options(
        directory=tmp_path, only=("schedules=agent", "schedules=home-and-de", "seeds=1")
    )
    plan = narrowed(online.protocol(options), options)
    runs = [(one.name, one.schedule.family) for one in online._runs(plan)]
    assert runs == [
        ("agent", "prose-agent"),
        *(("home-and-de", family) for family in plan.sizes["models"]),
    ]
    num = Schedule.model_validate(plan.sizes["schedules"]["agent"]).num_requests
    one = StepCounts(tokens=100, steps=50, drafts=50, drafted=200, tested=100, accepted=50)
    row = {
        **Curve.of([one] * num, seconds=np.ones(num)).as_row(),
        "schedule": "agent",
        "model": "prose-agent",
        "contender": names.SERVED,
        "price": online_report.PUBLISHED,
    }
    figures = online.summarise(plan, [row]).figures
    group = f"agent, price {online_report.PUBLISHED}: tokens/s, whole run"
    assert [f.value for f in figures if f.group == group] == [100.0]


def test_how_sure_the_target_is_does_not_depend_on_the_order_of_parts(tmp_path: Path) -> None:
    """The rows that tell it are of the first seed asked for, and say so."""
    keys = []
    for only in (("seeds=2",), ()):
        _, plan = part(tmp_path, *only)
        keys += [one.key["seed"] for one in where_it_pays._of_targets(plan)]
    assert keys == [*[2] * 3, *[0] * 3]


class _Asked(Exception):
    """Carries what a bench asks for."""


@pytest.mark.parametrize(
    ("name", "only", "num"),
    [
        ("memory", ("schedules=sharp", "schedules=natural", "seeds=0", "seeds=2"), 2 * (6 + 4)),
        ("payback", ("schedules=sharp", "seeds=0", "seeds=2"), 2 * len(payback.ARMS)),
        ("online", ("schedules=agent", "schedules=home-and-de", f"arms={names.SERVED}"), 3 * 4 * 2),
        ("where_it_pays", ("temperatures=0.3", "shares=0.05", "shares=0.3"), 1 + 3 * (2 + 2 * 5)),
        ("drafts", ("families=prose", "families=prose-2M-0%", "seeds=0", "seeds=1"), 2 * 2 * 14),
        ("heads", (f"arms={names.SERVED}", "seeds=0"), None),
    ],
)
def test_no_two_rows_of_a_bench_are_taken_for_one(
    name: str,
    only: tuple[str, ...],
    num: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(pool: object, notebook: object, asked: list[Asked], *_: object, **__: object) -> None:
        raise _Asked(asked)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(Family, "models", lambda self: None)
    monkeypatch.setattr(jobs, "record_stream", lambda *_: None)
    times = [{"arm": arm, "step_s": 0.1} for arm in (*map(str, WIDTHS), DRAFT)]
    monkeypatch.setattr(jobs, "step_times", lambda *_: times)
    module = memory if name == "payback" else bench(name)
    monkeypatch.setattr(module, "measured", stop)
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    with pytest.raises(_Asked) as found:
        bench(name).run(Options(directory=tmp_path, only=only))
    (rows,) = found.value.args
    assert len({json.dumps(row.key, sort_keys=True) for row in rows}) == len(rows) > 0
    for one in rows:
        assert not [o for o in rows if o is not one and one.key.items() <= o.key.items()]
    assert num in (None, len(rows))
