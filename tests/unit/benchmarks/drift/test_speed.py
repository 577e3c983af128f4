"""The live drift benchmark without engines.

Its process accounting, what servers are told, and its arithmetic.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drift import arms, names, speed
from benchmarks.drift.jobs import base_config
from benchmarks.drift.speed_report import summarise
from benchmarks.record import Notebook, Options
from benchmarks.replays.charged import WITHIN_S
from benchmarks.result import Figure
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Schedule, read_all
from osd.client.http import Client
from osd.client.load import Answer
from osd.errors import ConfigError

BURN = "import time\nwhile time.process_time() < {}: pass\n"


def test_cpu_time_of_a_tree_holds_children_and_those_that_ended() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); input()"
    with subprocess.Popen(
        [sys.executable, "-c", child, BURN.format(0.6) + "print('over', flush=True)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"over\n"
        assert 0.5 < arms.tree_cpu_seconds(process.pid) < 3
        assert arms.tree_cpu_seconds(os.getpid()) > arms.tree_cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert arms.tree_cpu_seconds(process.pid) == 0


def test_what_each_service_is_told_can_be_loaded() -> None:
    from osd.config.reading import load

    config = base_config()
    loaded = {
        arm: load(
            arms.PRESET,
            arms.overrides(arm, config, Path("t"), Path("d"), Path("data"), WITHIN_S),
            environ={},
        ).config
        for arm in arms.SERVICE_ARMS
    }
    assert not loaded[names.FROZEN].trainer.enabled
    assert not loaded[names.FROZEN].capture.enabled
    off, on = loaded[names.FROZEN_LOOP], loaded[names.SERVED]
    assert not off.trainer.enabled
    assert on.trainer.enabled and on.speculation == off.speculation and on.capture == off.capture
    assert loaded[names.OURS].trainer == config.trainer
    assert loaded[names.OURS_LORA].trainer.method == "lora"
    assert loaded[names.OURS_LORA].trainer.learning_rate == pytest.approx(
        3 * config.trainer.learning_rate
    )
    alone, learning = loaded[names.DRAFT_LOOP], loaded[names.LEARNING_DRAFT_LOOP]
    assert alone.speculation.proposers == learning.speculation.proposers == ["draft"]
    assert not alone.trainer.enabled and learning.trainer.enabled
    drawn = {loaded[arm].trainer.enabled: loaded[arm].speculation for arm in arms.DRAWN}
    mixed = {loaded[arm].trainer.enabled: loaded[arm].speculation for arm in arms.MIXED}
    assert drawn[True] == drawn[False] and drawn[True].is_sampled
    assert mixed[True] == mixed[False] and mixed[True].is_sampled
    assert drawn[True].proposers == ["draft"] and "memory" in mixed[True].proposers
    assert not alone.speculation.is_sampled
    loops = {
        *(names.SERVED, names.FROZEN_LOOP, names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP),
        *(*arms.DRAWN, *arms.MIXED),
    }
    assert {arm for arm, each in loaded.items() if each.speculation.mode == "auto"} == loops
    assert {
        arm for arm, each in loaded.items() if each.trainer.payback_seconds == WITHIN_S
    } == loops, "they differ in nothing but the memory and the trainer"
    assert {c.serving.vllm["enable_prefix_caching"] for c in loaded.values()} == {False}


def test_the_reference_is_told_nothing_of_speculation() -> None:
    from benchmarks.service.servers import bare_command

    plain = bare_command(Path("t"), None, name="tiny", port=7, options={"enforce_eager": True})
    assert "--speculative-config" not in plain
    ngram = bare_command(
        Path("t"), {"method": "ngram"}, name="tiny", port=7, options={"enforce_eager": True}
    )
    assert [part for part in ngram if part not in plain] == [
        "--speculative-config",
        '{"method": "ngram"}',
    ]


def part(seconds: float, charged_s: float, cpu_s: float, *, answer: int = 1) -> dict[str, Any]:
    request = {"tokens": 11, "ttft_s": 0.1, "seconds": seconds / 2, "hash": answer}
    return {"seconds": seconds, "charged_s": charged_s, "cpu_s": cpu_s, "requests": [request] * 24}


def figures(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Figure]:
    plan = speed.protocol(Options(directory=Path("unused"), quick=True))
    return {(f.group, f.name): f for f in summarise(plan, rows).figures}


def a_row(
    arm: str, start: int, contender: dict[str, Any], reference: dict[str, Any]
) -> dict[str, Any]:
    facts = {"num_swaps": 3} if arm == names.OURS else {}
    row = {"schedule": "sharp", "arm": arm, "start": start, "first": "contender", "facts": facts}
    return {**row, "contender": contender, "reference": reference}


def test_training_after_a_chunk_is_charged_and_shown() -> None:
    rows = [
        a_row(names.OURS, start, part(4, 1, 10), part(10, 0, 10)) for start in range(0, 120, 24)
    ]
    found = figures(rows)
    group = "sharp: all requests"
    assert found[group, "tokens/s, ours / no speculation"].value == 2.0
    assert found[group, "tokens/s, traffic alone, ours / no speculation"].value == 2.5
    assert found[group, "tokens per CPU second, ours / no speculation"].value == 1.0
    assert found[group, "tokens/s, ours"].value == pytest.approx(24 * 11 / 5)
    assert found[group, "TPOT, ours / no speculation"].value == pytest.approx((2 - 0.1) / (5 - 0.1))
    assert found["sharp: checks", "charged, ours"].value == 5
    assert found["sharp: checks", "num_swaps, ours"].value == 3


def test_acceptance_is_that_of_all_tokens_tested_and_of_services_alone() -> None:
    rows = [
        {**a_row(names.OURS, start, part(4, 1, 10), part(10, 0, 10)), "judged": judged}
        for start, judged in ((0, {"tested": 10, "accepted": 9}), (24, {"tested": 30}), (48, {}))
    ]
    rows += [a_row(names.NGRAM_TUNED, 0, part(5, 0, 1), part(10, 0, 1))]
    found = figures(rows)
    assert found["sharp: all requests", "acceptance, ours"].value == 9 / 40
    assert found["sharp: home", "acceptance, ours"].value == 0.9
    assert [key for key in found if key[1].startswith("acceptance")] == [
        ("sharp: all requests", "acceptance, ours"),
        ("sharp: home", "acceptance, ours"),
        ("sharp: sql", "acceptance, ours"),
    ]


PAGE = b"""# TYPE osd_spec_position_tested_total counter
osd_spec_position_tested_total{draft="default",position="0"} 7.0
osd_spec_position_tested_total{draft="default",position="1"} 4.0
# TYPE osd_spec_position_accepted_total counter
osd_spec_position_accepted_total{draft="default",position="0"} 4.0
# TYPE osd_spec_drafts_total counter
osd_spec_drafts_total{draft="default",domain=""} 99.0
"""


def test_what_was_judged_is_read_off_the_control_port() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        own = arms.Server(url="", pid=1, kind="service", client=Client(url, token="none"))
        assert own.judged() == {"tested": 11, "accepted": 4}
        server.shutdown()
    assert arms.Server(url="", pid=1, kind="bare").judged() == {}


def test_phases_are_told_apart_and_differing_answers_counted() -> None:
    rows = [a_row(names.NGRAM_TUNED, 0, part(5, 0, 1), part(10, 0, 1))]
    rows += [
        a_row(names.NGRAM_TUNED, start, part(20, 0, 1, answer=2), part(10, 0, 1))
        for start in range(24, 120, 24)
    ]
    found = figures(rows)
    name = "tokens/s, n-gram, 1 to 5 / no speculation"
    assert found["sharp: home", name].value == 2.0
    assert found["sharp: sql", name].value == 0.5
    assert found["sharp: checks", "answers that differ, n-gram, 1 to 5"].value == 96


def test_drawn_answers_are_not_compared() -> None:
    plan = speed.protocol(Options(directory=Path("unused")))
    row = a_row(names.DRAFT_LOOP, 0, part(5, 0, 1), part(10, 0, 1, answer=2))
    found = {f.name for f in summarise(plan, [{**row, "schedule": speed.PROSE}]).figures}
    assert f"charged, {names.DRAFT_LOOP}" in found
    assert not [name for name in found if name.startswith("answers that differ")]


def test_an_arm_that_was_cut_off_begins_anew() -> None:
    cut_off = [a_row(names.OURS, s, part(20, 0, 1), part(10, 0, 1)) for s in (0, 24)]
    again = [a_row(names.OURS, s, part(5, 0, 1), part(10, 0, 1)) for s in range(0, 120, 24)]
    found = figures(cut_off + again)
    figure = found["sharp: all requests", "tokens/s, ours / no speculation"]
    assert (figure.value, figure.n) == (2.0, 5)


def test_only_arms_that_are_whole_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(directory=tmp_path, only=("schedules=interleaved",))
    schedule = read_all()["interleaved"]
    last = (schedule.num_requests - 1) // speed.CHUNK * speed.CHUNK
    whole, cut_off = arms.IN_CLOSED_LOOP
    rows = [a_row(whole, s, part(5, 0, 1), part(10, 0, 1)) for s in range(0, last + 1, speed.CHUNK)]
    rows.append(a_row(cut_off, 0, part(5, 0, 1), part(10, 0, 1)))
    notebook = Notebook(options, speed.protocol(options))
    for row in rows:
        notebook.add(**{**row, "schedule": "interleaved"})
    measured: list[str] = []

    def measure(
        _: Options, notebook: Notebook, name: str, schedule: Schedule, arm: str, chunk: int
    ) -> None:
        measured.append(arm)
        notebook.add(**{**a_row(arm, 0, part(4, 0, 1), part(8, 0, 1)), "schedule": name})

    monkeypatch.setattr(speed, "_measure", measure)
    result = speed.run(options)
    assert measured == [cut_off]
    assert {f.name for f in result.figures} >= {f"charged, {arm}" for arm in (whole, cut_off)}


def test_prose_is_served_with_and_without_a_memory_and_with_sampled_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(
        _: Options, notebook: Notebook, name: str, schedule: Schedule, arm: str, chunk: int
    ) -> None:
        assert (name, schedule.num_requests) == (speed.PROSE, sum(speed.PROSE_PHASES))
        assert chunk == speed.CHUNK
        measured.append(arm)

    monkeypatch.setattr(speed, "_measure", measure)
    speed.run(Options(directory=tmp_path, only=(f"schedules={speed.PROSE}",)))
    assert sorted(measured) == sorted(arms.CLOSED_LOOPS)


class Requests:
    """What servers that answer at once are asked: prompts, and how many at a time, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[Sequence[str]] = []
        self.streams: list[int] = []
        costly = replace(FAMILIES["tiny"], costly_models=lambda: (Path("costly"), Path("draft")))
        monkeypatch.setitem(FAMILIES, "tiny", costly)
        monkeypatch.setattr(arms, "SECONDS_TO_SETTLE", {"bare": 0.0})
        monkeypatch.setattr(arms, "SECONDS_OF_QUIET", 0.0)
        monkeypatch.setattr(arms.Server, "cpu_seconds", lambda _: time.perf_counter())
        monkeypatch.setattr(arms, "both", self.both)
        monkeypatch.setattr(speed, "drive", self.drive)

    async def drive(
        self, url: str, name: str, prompts: Sequence[str], **given: Any
    ) -> list[Answer]:
        self.prompts.append(prompts)
        self.streams.append(given["streams"])
        return [
            Answer(index=0, ok=True, token_ids=(1, 2), ttft_s=0.1, seconds=0.2) for _ in prompts
        ]

    @contextmanager
    def both(self, arm: str, target: Path, *_: Any) -> Iterator[tuple[arms.Server, arms.Server]]:
        assert target == Path("costly")
        yield tuple(arms.Server(url="", pid=os.getpid(), kind="bare") for _ in range(2))


@pytest.mark.parametrize(("fewer", "num"), [({}, 4), ({"sharp": 2}, 2)])
def test_a_schedule_has_its_own_number_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewer: dict[str, int], num: int
) -> None:
    asked = Requests(monkeypatch)
    monkeypatch.setattr(speed, "FEWER_STREAMS", fewer)
    only = ("schedules=sharp", f"arms={names.NGRAM_TUNED}")
    speed.run(Options(directory=tmp_path, quick=True, only=only))
    assert set(asked.streams) == {num}
    num_chunks = sum(speed.QUICK_PHASES) // speed.CHUNK
    assert len(asked.streams) == 2 + 2 * num_chunks, "both, warmed up first"


@pytest.mark.parametrize("name", sorted(speed.LONG_TURNS))
def test_long_turns_are_of_the_same_requests(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for schedule in (name, speed.LONG_TURNS[name]):
        asked = Requests(monkeypatch)
        (directory := tmp_path / schedule).mkdir()
        only = (f"schedules={schedule}", f"arms={names.FROZEN_LOOP}")
        speed.run(Options(directory=directory, only=only))
        found.append(list(dict.fromkeys(prompt for some in asked.prompts for prompt in some)))
    assert found[0] == found[1] and len(found[0]) > 600


@pytest.mark.parametrize("name", sorted(speed.LONG_TURNS))
def test_turns_are_longer_where_learning_is_held_against_its_absence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is not measured again."""
    measured: list[tuple[str, int]] = []
    plan = speed.protocol(Options(directory=tmp_path))
    assert plan.sizes["payback_s"][name] == plan.sizes["payback_s"][speed.LONG_TURNS[name]]

    def measure(_: Options, notebook: Notebook, *given: Any) -> None:
        _, schedule, arm, chunk = given
        measured.append((arm, chunk))
        for start in range(0, schedule.num_requests, chunk):
            notebook.add(**{**a_row(arm, start, part(4, 1, 1), part(6, 0, 1)), "schedule": name})

    monkeypatch.setattr(speed, "_measure", measure)
    for _ in range(2):
        result = speed.run(Options(directory=tmp_path, only=(f"schedules={name}",)))
    assert measured == [(arm, speed.LONG_CHUNK) for arm in arms.IN_CLOSED_LOOP]
    found = {f.name: f for f in result.figures if f.group == f"{name}: all requests"}
    ratio = found[f"tokens/s, {names.SERVED} / {names.FROZEN_LOOP}"]
    assert (ratio.value, ratio.n) == (1.2, 3)


@pytest.mark.parametrize(
    ("arm", "against"),
    [(names.MIXED_SERVED, names.MIXED_FROZEN_LOOP), (names.SERVED, names.FROZEN_LOOP)],
)
def test_a_service_may_stand_next_to_the_identical_one_with_its_trainer_off(
    arm: str, against: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    def start(_: Any, given: list[str], deployment: str, log: Path) -> Any:
        told.append([*given, f"deployment={deployment}"])
        return lambda: arms.Server(url=log.stem, pid=os.getpid(), kind="service")

    monkeypatch.setattr(arms, "_start_service", start)
    assert against in speed.AGAINST.values()
    given = (Path("t"), Path("d"), tmp_path, tmp_path, None, against)
    with arms.both(arm, *given) as (contender, reference):
        assert (contender.url, reference.url) == ("contender", "reference")
    other, own = ({line.partition("=")[0]: line for line in lines} for lines in told)
    assert {name for name in {*own, *other} if own.get(name) != other.get(name)} == {
        *("trainer.enabled", "deployment", "data_dir"),
    }
    assert other["trainer.enabled"] == "trainer.enabled=false"


def test_ratios_are_over_the_reference_that_ran() -> None:
    plan = speed.protocol(Options(directory=Path("unused")))
    row = a_row(names.MIXED_SERVED, 0, part(5, 0, 1), part(10, 0, 1))
    for schedule in speed.PAIRED:
        found = {f.name: f for f in summarise(plan, [{**row, "schedule": schedule}]).figures}
        name = f"tokens/s, {names.MIXED_SERVED} / {names.MIXED_FROZEN_LOOP}"
        assert found[name].value == 2.0
        assert not [name for name in found if "no speculation" in name]


def test_figures_are_told_by_stretches_of_a_long_phase() -> None:
    plan = speed.protocol(Options(directory=Path("unused")))
    (_, two, _) = speed.PAIRED
    rows = [
        {**a_row(names.MIXED_SERVED, start, part(5, 0, 1), part(5 + start, 0, 1)), "schedule": two}
        for start in range(0, sum(speed.PAIRED_PHASES[two]), speed.CHUNK)
    ]
    name = f"tokens/s, {names.MIXED_SERVED} / {names.MIXED_FROZEN_LOOP}"
    found = {f.group: f for f in summarise(plan, rows).figures if f.name == name}
    of_parts = {group.partition(": ")[2]: (round(f.value, 6), f.n) for group, f in found.items()}
    assert of_parts == {
        "all requests": (32.2, 14),
        "English": (1.0, 1),
        "German": (32.2, 12),
        "1 to 96 of German": (13.0, 4),
        "97 to 192 of German": (32.2, 4),
        "last 96 of German": (51.4, 4),
        "English again": (63.4, 1),
    }


def test_totals_weigh_chunks_by_their_time() -> None:
    plan = speed.protocol(Options(directory=Path("unused")))
    first, second = part(5, 1, 2), part(20, 5, 10)
    rows = [
        {**a_row(names.MIXED_SERVED, start, mine, part(10, 0, 4)), "schedule": speed.PAIRED[0]}
        for start, mine in ((24, first), (48, second))
    ]
    group = f"{speed.PAIRED[0]}: German"
    found = {f.name: f.value for f in summarise(plan, rows).figures if f.group == group}
    between = f"all tokens over all time, {names.MIXED_SERVED} / {names.MIXED_FROZEN_LOOP}"
    assert found[f"tokens/s, {between}"] == pytest.approx(20 / 31)
    assert found[f"tokens/s, traffic alone, {between}"] == pytest.approx(20 / 25)
    assert found[f"tokens per CPU second, {between}"] == pytest.approx(8 / 12)


def test_a_target_that_costs_more_is_served_one_and_two_at_a_time() -> None:
    sizes = speed.protocol(Options(directory=Path("unused"))).sizes
    large = {name for name, tree in sizes["schedules"].items() if tree["family"] == "prose-large"}
    assert sorted(sizes["streams"][name] for name in large) == [1, 1, 2, 2, 2]
    assert {sizes["streams"][name] for name in set(sizes["schedules"]) - large} == {4}
    assert large == {*speed.LARGE, *speed.PAIRED}
    assert all(set(speed.ARMS[name]) == set(arms.MIXED) for name in speed.LARGE)


def test_arms_that_no_schedule_has_are_nothing_to_measure(tmp_path: Path) -> None:
    only = (f"schedules={speed.PROSE}", f"arms={names.OURS}")
    with pytest.raises(ConfigError, match="--only: leaves nothing"):
        speed.run(Options(directory=tmp_path, only=only))


class FakeClient:
    """A service that trains for some seconds, then swaps for some more."""

    def __init__(self, training_s: float, swapping_s: float) -> None:
        self._until = time.perf_counter() + training_s
        self._swapped_at = self._until + swapping_s

    def get(self, path: str) -> dict[str, Any]:
        now = time.perf_counter()
        return {
            "phase": "training" if now < self._until else "waiting",
            "version": 2 if now >= self._until else 1,
            "replicas": [{"version": 2 if now >= self._swapped_at else 1}],
        }


def test_a_round_under_way_is_waited_for_and_so_is_its_swap() -> None:
    client: Any = FakeClient(0.8, 0.6)
    ended = time.perf_counter()
    server = arms.Server(url="", pid=os.getpid(), kind="service", client=client)
    until, spent = server.settle(ended)
    assert 1.0 < until - ended < 1.6
    assert spent <= server.cpu_seconds()
    assert time.perf_counter() - ended >= arms.SECONDS_TO_SETTLE["service"]


def test_a_server_that_does_not_train_is_charged_nothing() -> None:
    ended = time.perf_counter()
    until, _ = arms.Server(url="", pid=os.getpid(), kind="bare").settle(ended)
    assert until == ended


def test_a_quick_run_keeps_the_phases_and_shortens_them() -> None:
    quick, full = (
        speed.protocol(Options(directory=Path("x"), quick=q)).sizes["schedules"]
        for q in (True, False)
    )
    assert [p["name"] for p in quick["sharp"]["phases"]] == [
        p["name"] for p in full["sharp"]["phases"]
    ]
    assert [p["requests"] for p in quick["sharp"]["phases"]] == [24, 96]
