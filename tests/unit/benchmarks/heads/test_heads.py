"""Replays of EAGLE-3 heads, which propose otherwise at each depth, and the figures of their
bench."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import names
from benchmarks.drift.contenders import train_ceiling, with_proposers
from benchmarks.heads import heads, report
from benchmarks.heads import jobs as heads_jobs
from benchmarks.learning.online_report import PUBLISHED
from benchmarks.record import Options, Protocol, Row
from benchmarks.replays import closed_loop
from benchmarks.replays.closed_loop import ClosedLoop
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.learning import learn
from benchmarks.replays.recording import kinds
from benchmarks.replays.served import EveryStep, counts_of, features_of, matches_of, right_from
from benchmarks.replays.step_times import STREAMS, published
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Arrival, Schedule
from osd.records import ACCEPTED, PLAIN, REJECTED
from tests.support.deep_targets import TAPS, save_target
from tests.support.heads import write_head
from tests.unit.benchmarks.drift.test_contenders import a_setup, recorded

K = 4
OF_DEPTH = np.array([[1, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 1]], bool)
"""Right at the first depth of a step, and at those behind it."""


def test_a_steps_tokens_are_right_by_their_depth() -> None:
    assert right_from(OF_DEPTH, 0, 3).tolist() == [True, True, False]
    assert right_from(OF_DEPTH, 2, 4).tolist() == [True, True, True, False]
    assert right_from(OF_DEPTH, 5, 4).tolist() == [True, True], "the answer ends"
    assert right_from(OF_DEPTH, 7, 4).tolist() == []
    assert right_from(OF_DEPTH[:1], 0, 3).tolist() == [True, False, True], "all depths alike"


def test_fates_and_counts_of_a_head_agree() -> None:
    kind_T = kinds(OF_DEPTH, 3, 8)
    # From token 1 on: a step of two right and one wrong, then one that a free token follows.
    expected = [PLAIN, ACCEPTED, ACCEPTED, REJECTED, ACCEPTED, ACCEPTED, REJECTED, ACCEPTED]
    assert kind_T.tolist() == expected
    counts = counts_of(OF_DEPTH, 3)
    assert (counts.tokens, counts.steps) == (7, 3)
    assert counts.accepted == (kind_T == ACCEPTED).sum()
    assert counts.tested - counts.accepted == (kind_T == REJECTED).sum()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), target, taps=TAPS)


@pytest.fixture(scope="module")
def good(target: Path, head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained offline on the planted language."""
    out = tmp_path_factory.mktemp("good") / "head"
    config = a_setup(head, out).config
    train_ceiling(config, head, recorded(64, start=1000), out, features_of(target, K, 1 << 30))
    return out


def test_the_closed_loop_serves_a_head_as_every_other_replay(
    target: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_loop, "NOISE", 0.0)
    requests, features = recorded(20), features_of(target, K)
    config = a_setup(good, good).config
    fixed = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"mode": "fixed"})}
    )
    plain = EveryStep(requests, K, features)
    loop = ClosedLoop(
        requests, with_proposers(fixed, ["draft"]), published(), seed=0, features=features
    )
    for server in (plain, loop):
        server.swap(good, None)
    assert plain.model is not None
    matches = [matches_of(plain.model, one) for one in requests]
    assert any((of_head[0] != of_head[-1]).any() for of_head in matches), "depths differ"
    expected = list(plain.serve())
    found = sorted(loop.serve(), key=lambda one: one.index)
    assert sum(one.counts.accepted for one in found) > 0.5 * sum(o.counts.tokens for o in found)
    for own, other in zip(found, expected, strict=True):
        assert own.counts == other.counts
        assert own.kind_T.tolist() == other.kind_T.tolist()


def test_a_head_learns_in_a_replay_and_its_features_are_counted(
    target: Path, head: Path, tmp_path: Path
) -> None:
    setup = a_setup(head, tmp_path, 160)
    server = EveryStep(setup.requests, K, features_of(target, K))
    curve = learn(
        setup.config, head, setup.requests, tmp_path, seed=0, server=server, target=target
    )
    assert curve.num_published > 0
    assert curve.alpha(128) > curve.alpha(0, 32) + 0.2
    assert 0 < curve.notes["features_cpu_s"] < curve.cpu_s[-1]
    assert server.model is not None
    unseen = recorded(16, start=5000)
    server.swap(head, None)
    first = heads_jobs.alpha_of(server.model, unseen, K)
    assert first < 0.3


def test_home_requests_that_are_measured_are_never_served() -> None:
    coming = [Arrival(domain=d, index=i, at=0.0) for d, i in (("en", 0), ("de", 0), ("en", 1))]
    assert heads_jobs.unserved(coming, "en") == 2
    assert heads_jobs.unserved(coming, "de") == 1
    assert heads_jobs.unserved(coming, "fr") == 0


def test_offline_training_knows_the_new_traffic_alone(tmp_path: Path) -> None:
    plan = heads.protocol(Options(directory=tmp_path, quick=True))
    jobs = list(heads._jobs(plan))
    assert {heads_jobs.foreign(job.schedule) for job in jobs} == {("sql",), ("de",)}
    streams = heads._streams(jobs)
    assert ("prose-head", "en", 1, 96 + 48) in streams, "served, then those kept for measuring"
    assert ("prose-head", "de", 0, 96) in streams
    assert not any(domain == "en" and block == 0 for _, domain, block, _ in streams)


def test_head_and_model_share_target_and_recordings() -> None:
    for model, head in heads.FAMILIES_OF.values():
        assert FAMILIES[head].recorded_as == model
        assert FAMILIES[head].home() == FAMILIES[model].home()
        assert FAMILIES[head].temperature == FAMILIES[model].temperature


def a_row(arm: str, family: str, right: int, home: tuple[float, float], cpu_s: float) -> Row:
    """A run of 4 home requests and 60 others: `right` of 4 draft tokens are right off home, in the
    first half one less where it learns."""
    counts = []
    for index in range(64):
        late = index >= 34 or arm not in heads_jobs.LEARNING
        num = 4 if index < 4 else right if late else 1
        counts.append(
            StepCounts(
                tokens=10 * (num + 1),
                steps=10,
                drafts=10,
                drafted=40,
                tested=10 * min(num + 1, 4),
                accepted=10 * num,
            )
        )
    seconds = None if arm in heads_jobs.TIMELESS else np.full(64, 10 * 0.01 / STREAMS)
    curve = Curve.of(
        counts,
        [cpu_s] * 64,
        seconds=seconds,
        num_rounds=5,
        num_published=3,
        notes={"features_cpu_s": cpu_s / 4},
    )
    row = {"schedule": "s", "family": family, "seed": 0, "contender": arm, "price": PUBLISHED}
    return {**row, "home": list(home), **curve.as_row()}


def a_plan() -> Protocol:
    phases = [
        {"name": "home", "requests": 4, "mix": {"en": 1}},
        {"name": "german", "requests": 60, "mix": {"de": 1}},
    ]
    return Protocol(
        bench="heads",
        question="?",
        arms=(*heads_jobs.TIMELESS, *heads_jobs.LOOPS),
        order="",
        sizes={
            "schedules": {
                "s": Schedule.model_validate({"family": "prose", "phases": phases}).model_dump()
            },
            "families": {"s": ("prose", "prose-head")},
            "prices": [PUBLISHED],
        },
    )


def figures_of(rows: list[Row]) -> dict[tuple[str, str], float]:
    found = report.summarise(a_plan(), rows)
    return {(figure.group, figure.name): figure.value for figure in found.figures}


def test_the_two_by_two_compares_learning_with_frozen_late_off_home() -> None:
    rights = {
        names.FROZEN: 1,
        names.OURS: 3,
        names.CEILING: 3,
        names.DRAFT_LOOP: 1,
        names.LEARNING_DRAFT_LOOP: 3,
        names.FROZEN_LOOP: 2,
        names.SERVED: 3,
    }
    rows = [a_row(arm, "prose-head", n, (0.8, 0.6), 8.0) for arm, n in rights.items()]
    found = figures_of(rows)
    side = f"s, prose-head, price {PUBLISHED}"
    compared = f"{side}: compared"
    assert found[compared, report.WITHOUT] == pytest.approx(4 / 2)
    assert found[compared, report.WITH] == pytest.approx(4 / 3)
    assert found[compared, report.OF_OFFLINE] == pytest.approx(1.0)
    kept = found[f"{compared}, {names.SERVED}", report.HOME_KEPT]
    assert kept == pytest.approx(0.75)
    training = f"{side}: training, {names.OURS}"
    assert found[training, "CPU"] == 8.0
    assert found[training, "of it the target's features"] == 2.0
    reached = f"{side}: requests to 90% of the α trained offline"
    # Of the window's 48 requests 22 may be of the half in which it had not learnt.
    assert found[reached, names.OURS] == 8


def test_arms_that_did_not_run_are_left_out() -> None:
    found = figures_of([a_row(names.FROZEN, "prose", 1, (0.8, 0.8), 0.0)])
    assert found[f"s, prose, price {PUBLISHED}: α, german", names.FROZEN] == pytest.approx(0.5)
    assert not any("compared" in group for group, _ in found)


def test_decode_speed_is_held_against_no_speculation() -> None:
    (row,) = (a_row(names.FROZEN, "prose", 1, (0.8, 0.8), 0.0),)
    found = figures_of([row])
    times = published()
    expected = 2 * times.verify_s[0] / (times.verify_s[1] + times.draft_s)
    group = f"s, prose, price {PUBLISHED}: decode speed over none, german"
    assert found[group, names.FROZEN] == pytest.approx(expected)
