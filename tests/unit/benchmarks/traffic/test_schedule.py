"""Drift schedules: the shipped files, what their reader refuses, and how they are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.learning.online import SCHEDULES
from benchmarks.traffic.family import BLOCK_SIZE, FAMILIES, FIRST_SERVED, TRAINING
from benchmarks.traffic.recordings import CHUNK
from benchmarks.traffic.schedule import Phase, Schedule, arrivals, read, read_all, returns, shifts
from osd.errors import ConfigError


def a_schedule(*phases: tuple[str, int, dict[str, float]], **fields: object) -> Schedule:
    made = tuple(Phase(name=name, requests=num, mix=mix) for name, num, mix in phases)
    return Schedule.model_validate({"family": "tiny", "phases": made, **fields})


def test_the_shipped_schedules_are_those_that_are_promised() -> None:
    found = read_all()
    assert set(found) == {
        "steady",
        "sharp",
        "smooth",
        "oscillating",
        "interleaved",
        "low-rate",
        "natural",
        "long",
    }
    assert all(
        500 <= schedule.num_requests <= 700 for name, schedule in found.items() if name != "long"
    )
    assert found["long"].num_requests == 1248
    assert found["low-rate"].requests_per_second == 1
    assert found["natural"].family == "natural"
    assert set(found["interleaved"].domains) == {"arithmetic", "sql", "python", "finance"}


def test_no_prompt_comes_twice_and_training_meets_none() -> None:
    tiny = FAMILIES["tiny"]
    for domain in tiny.domains():
        blocks = [
            tiny.prompts(domain, block, BLOCK_SIZE)
            for block in (TRAINING, FIRST_SERVED, FIRST_SERVED + 1)
        ]
        everything = [prompt for block in blocks for prompt in block]
        assert len(set(everything)) == len(everything), domain


def test_a_schedule_takes_each_stream_from_its_beginning_without_gaps() -> None:
    for name, schedule in read_all().items():
        coming = arrivals(schedule, name, seed=1)
        assert len(coming) == schedule.num_requests
        for domain in schedule.domains:
            indices = [a.index for a in coming if a.domain == domain]
            assert indices == list(range(len(indices)))
            assert len(indices) <= BLOCK_SIZE
        assert coming == arrivals(schedule, name, seed=1)


def test_the_schedules_of_prose_are_a_latin_square_and_controls() -> None:
    found = read_all(SCHEDULES)
    languages = ["en", "de", "fr", "es", "ru"]
    rows = [[*found[f"sharp-{row}"].domains] for row in range(1, 6)]
    for places in (rows, zip(*rows, strict=True)):
        assert all(sorted(one) == sorted(languages) for one in places)
    for language in languages[1:]:
        assert [one.mix for one in found[f"home-and-{language}"].phases] == [
            {"en": 1},
            {language: 1},
            {"en": 1},
        ]
    assert sorted(found["interleaved"].domains) == sorted(languages)
    assert found["topic-de"].domains == ("de", "de-man")
    assert found["agent"].family == "prose-agent"
    for name, schedule in found.items():
        size = FAMILIES[schedule.family].block_size
        for seed in range(3):
            coming = Counter(arrival.domain for arrival in arrivals(schedule, name, seed))
            assert all(-(-num // CHUNK) * CHUNK <= size for num in coming.values()), name


def test_another_draft_is_another_family_with_the_same_recordings() -> None:
    large = FAMILIES["prose-1-2M-20%"]
    assert large.recorded_as == "prose-1"
    assert large.models.args == (1, "2M", 0.2)  # type: ignore[attr-defined]
    assert FAMILIES["prose-1"].recorded_as == FAMILIES["prose-agent"].recorded_as == ""
    assert len([name for name in FAMILIES if name.startswith("prose-0.4M")]) == 4
    assert "prose-1M-0%" not in FAMILIES  # that is prose


def test_a_family_has_blocks_of_its_own_size() -> None:
    with pytest.raises(ConfigError, match="577 requests of de: a schedule may ask for 576 of"):
        FAMILIES["prose"].prompts("de", FIRST_SERVED, 577)


def test_each_phase_brings_its_own_traffic() -> None:
    schedule = a_schedule(("one", 30, {"sql": 1}), ("two", 200, {"sql": 1, "python": 3}))
    domains = [arrival.domain for arrival in arrivals(schedule, "some", 0)]
    assert set(domains[:30]) == {"sql"}
    assert 120 < Counter(domains[30:])["python"] < 180
    assert domains != [arrival.domain for arrival in arrivals(schedule, "some", 1)]


def test_a_smooth_change_is_linear() -> None:
    phase = Phase(
        name="turning", requests=101, mix={"arithmetic": 2}, mix_at_end={"sql": 1, "python": 1}
    )
    assert phase.shares(0) == {"arithmetic": 1}
    assert phase.shares(50) == pytest.approx({"arithmetic": 0.5, "sql": 0.25, "python": 0.25})
    assert phase.shares(100) == {"sql": 0.5, "python": 0.5}


def test_the_clock_follows_the_rate() -> None:
    slow = a_schedule(("one", 3, {"sql": 1}), requests_per_second=0.5)
    assert [arrival.at for arrival in arrivals(slow, "slow", 0)] == [0.0, 2.0, 4.0]


def test_shifts_and_returns_of_the_shipped_schedules() -> None:
    found = read_all()
    tiny = FAMILIES["tiny"]
    assert shifts(found["steady"], tiny) == []
    assert shifts(found["sharp"], tiny) == [1]
    assert shifts(found["interleaved"], tiny) == [0]  # the draft knows home alone
    assert shifts(found["smooth"], tiny) == [1]  # what has been turned into is no shift any more
    assert shifts(found["oscillating"], tiny) == [1, 2, 3]
    assert returns(found["oscillating"]) == [(0, 2), (1, 3)]
    assert returns(found["sharp"]) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "family: huge\nphases: [{name: a, requests: 1, mix: {sql: 1}}]",
            "family must be one of tiny, natural",
        ),
        (
            "family: tiny\nphases: [{name: a, requests: 1, mix: {prose: 1}}]",
            "no domain 'prose'; it has arithmetic",
        ),
        (
            "family: tiny\nphases: [{name: a, requests: 0, mix: {sql: 1}}]",
            r"phases\.0\.requests: .*greater than 0",
        ),
        (
            "family: tiny\nphases: [{name: a, requests: 1, mix: {sql: -1}}]",
            r"mix: weights must be above 0",
        ),
        ("family: tiny\nphases: [{name: a, requests: 1, mixture: {sql: 1}}]", r"phases\.0\.mix"),
        (
            "family: tiny\nphase: []\nphases: [{name: a, requests: 1, mix: {sql: 1}}]",
            "phase: Extra inputs",
        ),
        ("family: tiny\nphases: []", "phases: .*at least 1 item"),
        ("family: [", "not valid YAML"),
        (
            "family: tiny\nphases: [{name: a, requests: 1, mix: {sql: 1}}, {name: a, requests: 1, "
            "mix: {sql: 1}}]",
            "two phases have the same name",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        read(tmp_path / "none.yaml")
