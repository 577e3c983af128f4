"""What is held against learning online, and the figures of the contest, from made-up runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import contenders, names, rivals
from benchmarks.drift.contenders import Setup
from benchmarks.learning import online, online_report
from benchmarks.learning.online_report import MIXED_OVER
from benchmarks.record import Options, Protocol, Row
from benchmarks.replays.curve import Curve, StepCounts
from benchmarks.replays.step_times import STREAMS, WIDTHS, published
from benchmarks.result import Figure
from benchmarks.stats import hierarchical
from osd.config.schema import Config
from tests.support.tiny_drafts import save_draft
from tests.unit.benchmarks.drift.test_contenders import a_setup

END = 60
SCHEDULE = {
    "family": "prose",
    "phases": [
        {"name": "home", "requests": 12, "mix": {"en": 1}},
        {"name": "german", "requests": 36, "mix": {"de": 1}},
        {"name": "home-again", "requests": 12, "mix": {"en": 1}},
    ],
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("draft") / "draft")


def timed(draft: Path, directory: Path, num: int) -> Setup:
    """Without a memory, which would know the planted language sooner."""
    setup = a_setup(draft, directory, num)
    speculation = setup.config.speculation.model_copy(update={"proposers": ["draft"]})
    config = setup.config.model_copy(update={"speculation": speculation})
    return replace(setup, config=config, times=published())


def test_two_services_alike_differ_by_noise_alone(draft: Path, tmp_path: Path) -> None:
    setup = timed(draft, tmp_path, 24)
    off, again = rivals.RIVALS[names.STATIC](setup), rivals.RIVALS[names.AGAIN](setup)
    assert off.seconds is not None and again.seconds is not None
    assert (off.seconds != again.seconds).any()
    assert off.seconds.sum() == pytest.approx(again.seconds.sum(), rel=0.2)
    assert off.total("tokens") == again.total("tokens") == 24 * 23


def test_what_is_learnt_at_night_serves_by_day(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "NIGHT", 32)
    setup = timed(draft, tmp_path, 96)
    curve = rivals.nightly(setup)
    assert curve.num_rounds == 2, "nothing is served after the third"
    first = int(np.flatnonzero(curve.cpu_s)[0])
    assert 28 <= first <= 36 and (np.diff(curve.cpu_s) >= 0).all()
    assert curve.seconds is not None
    untrained = rivals.RIVALS[names.STATIC](setup).seconds
    assert untrained is not None
    assert curve.seconds[-24:].sum() < 0.9 * untrained[-24:].sum()
    assert curve.seconds[:24].sum() == untrained[:24].sum()


def test_osd_learns_under_the_closed_loop(draft: Path, tmp_path: Path) -> None:
    setup = timed(draft, tmp_path, 160)
    quick = rivals.osd(setup, every=8, learning_rate=1e-2)
    slow = rivals.osd(setup, every=8, learning_rate=1e-7)
    assert quick.num_rounds and quick.cpu_s[-1] > 0
    assert quick.seconds is not None and slow.seconds is not None
    assert quick.seconds[-48:].sum() < 0.95 * slow.seconds[-48:].sum()


def test_a_step_at_the_published_price() -> None:
    times = published(num_kv_tokens=0)
    per_token = 2.10103129e-5 * STREAMS
    plain = 5.88590713e-3 + 1.20683946e-3 + per_token
    assert times.step(0, drafts=False) == pytest.approx(plain)
    wide = WIDTHS[-1]
    assert times.step(wide, drafts=False) == pytest.approx(plain + per_token * wide)
    assert times.draft_s == pytest.approx(2.13526175e-3 + 8.41429603e-7 * STREAMS)


def test_an_interval_over_models_is_wider_than_one_over_traffic_alone() -> None:
    of_models = [[1.0, 1.01, 1.02], [1.2, 1.21, 1.22], [1.4, 1.41, 1.42]]
    of_traffic = [[1.0, 1.2, 1.4], [1.01, 1.21, 1.41], [1.02, 1.22, 1.42]]
    wide, narrow = hierarchical(of_models), hierarchical(of_traffic)
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])
    low, high = hierarchical(of_models, 0.999)
    assert low <= wide[0] < 1.21 < wide[1] <= high
    with pytest.raises(ValueError, match=r"\[3\] values per model"):
        hierarchical([[1.0, 2.0, 3.0]])


def curve(tokens_per_second: float, cpu_s: float = 0.0, alpha: float = 0.5) -> Curve:
    one = StepCounts(
        tokens=100, steps=50, drafts=50, drafted=200, tested=100, accepted=int(100 * alpha)
    )
    spent = np.linspace(0, cpu_s, END).tolist()
    seconds = np.full(END, 100 / tokens_per_second)
    return Curve.of([one] * END, spent, seconds=seconds, num_rounds=int(cpu_s > 0))


def slow_at_first(tokens_per_second: float) -> Curve:
    """Half as fast in the first fifth, so that a mean over all says something else than the end."""
    found = curve(tokens_per_second)
    assert found.seconds is not None
    found.seconds[: END // 5] *= 2
    return found


def plan(tmp_path: Path) -> Protocol:
    found = online.protocol(Options(directory=tmp_path))
    sizes = found.sizes | {
        "schedules": {"german": SCHEDULE},
        "models": ["prose", "prose-1"],
        "seeds": [0, 1],
    }
    arms = (
        *(names.FROZEN_LOOP, names.AGAIN, names.SERVED, names.CHARGED),
        *(names.DRAFT_LOOP, names.LEARNING_DRAFT_LOOP, names.DRAWN_DRAFT_LOOP),
        *(names.DRAWN_SERVED, names.DRAWN_CHARGED, *online_report.TIMELESS),
        *(names.MIXED_FROZEN_LOOP, names.MIXED_SERVED, names.MIXED_CHARGED, names.MIXED_NEVER_BACK),
        *names.MIXED_RIVALS,
    )
    return replace(found, sizes=sizes, arms=arms)


def rows(given: Protocol, curves: dict[str, Curve]) -> list[Row]:
    found: list[Row] = []
    for model in given.sizes["models"]:
        for seed in given.sizes["seeds"]:
            for arm, one in curves.items():
                for price in given.sizes["prices"]:
                    if arm in online_report.TIMELESS and price != online_report.PUBLISHED:
                        continue
                    row = {"schedule": "german", "contender": arm, "seed": seed, "price": price}
                    found.append({**row, "model": model, **one.as_row()})
    return found


def figure(figures: tuple[Figure, ...], name: str, price: str) -> Figure:
    (found,) = [one for one in figures if one.name == name and price in one.group]
    return found


def test_what_the_contest_says(tmp_path: Path) -> None:
    given = plan(tmp_path)
    off = curve(100.0)
    curves = {
        names.FROZEN_LOOP: off,
        names.AGAIN: off,
        names.SERVED: curve(120.0),
        names.CHARGED: curve(110.0, cpu_s=6.0),
        names.DRAFT_LOOP: curve(90.0),
        names.LEARNING_DRAFT_LOOP: curve(126.0),
        names.FROZEN: curve(1.0, alpha=0.2),
        names.OURS: curve(1.0, alpha=0.45),
        names.CEILING: curve(1.0, alpha=0.5),
        names.DRAWN_DRAFT_LOOP: curve(80.0),
        names.DRAWN_SERVED: curve(160.0),
        names.DRAWN_CHARGED: curve(150.0, cpu_s=6.0),
        names.MIXED_FROZEN_LOOP: curve(125.0),
        names.MIXED_SERVED: curve(175.0),
        names.MIXED_CHARGED: curve(200.0, cpu_s=6.0),
        names.MIXED_NEVER_BACK: curve(150.0),
        names.MIXED_NIGHTLY: slow_at_first(140.0),
        names.DRAWN_OURS: curve(1.0, alpha=0.6),
        names.DRAWN_CEILING: curve(1.0, alpha=0.8),
    }
    result = online.summarise(given, rows(given, curves))
    for price in given.sizes["prices"]:
        gain = figure(result.figures, online_report.LAST_THIRD, price)
        assert (gain.value, gain.low, gain.n) == pytest.approx((1.2, 1.2, 4))
        assert figure(result.figures, online_report.ALIKE, price).value == pytest.approx(1.0)
        alone = figure(result.figures, online_report.WITHOUT_MEMORY, price)
        assert alone.value == pytest.approx(1.4)
        assert figure(result.figures, online_report.HOME_AGAIN, price).value == pytest.approx(1.2)
        of_offline = figure(result.figures, online_report.OF_OFFLINE, price)
        assert of_offline.value == pytest.approx(0.9)
        for name, value in {
            online_report.DRAWN: 1.6,
            online_report.DRAWN_LEARNT: 2.0,
            online_report.DRAWN_AGAIN: 1.6,
            online_report.DRAWN_OF_OFFLINE: 0.75,
            online_report.MIXED: 1.4,
            online_report.MIXED_OFF: 1.75,
            online_report.MIXED_AGAIN: 1.4,
            online_report.MIXED_AGAIN_NEVER_BACK: 1.2,
        }.items():
            assert figure(result.figures, name, price).value == pytest.approx(value)
        over_nights = [
            one.value
            for one in result.figures
            if price in one.group and one.name.startswith(MIXED_OVER[names.MIXED_NIGHTLY])
        ]
        assert over_nights == pytest.approx([1.25, 1.5]), "of the last third, of the whole run"
        others = {over for rival, over in MIXED_OVER.items() if rival != names.MIXED_NIGHTLY}
        assert not [one for one in result.figures if one.name in others], "they did not run"
    # 60 requests of 100 tokens at 110 a second, and 6 seconds of a trainer.
    whole = figure(result.figures, online_report.WHOLE, online_report.MEASURED)
    assert whole.value == pytest.approx((6000 / (6000 / 110 + 6)) / 100)
    drawn = figure(result.figures, online_report.DRAWN_WHOLE, online_report.MEASURED)
    assert drawn.value == pytest.approx((6000 / (40 + 6)) / 100)
    mixed = figure(result.figures, online_report.MIXED_WHOLE, online_report.MEASURED)
    assert mixed.value == pytest.approx((6000 / (30 + 6)) / 125)
    burnt = figure(result.figures, online_report.BURNT, online_report.MEASURED)
    assert burnt.value == pytest.approx((6000 / (60 + 6)) / 100)
    charged = [f for f in result.figures if "whole run, charged" in f"{f.group} {f.name}"]
    assert charged and not [f for f in charged if "H100" in f.group], (
        "CPU seconds of this trainer are none of a GPU"
    )


def test_a_learner_without_a_memory_proposes_from_its_draft_alone(
    draft: Path, tmp_path: Path
) -> None:
    setup = a_setup(draft, tmp_path, 160)
    config = setup.config.model_copy(
        update={
            "speculation": setup.config.speculation.model_copy(
                update={"proposers": ["draft", "memory"]}
            )
        }
    )
    given = replace(setup, config=config, times=published())
    alone = rivals.RIVALS[names.LEARNING_DRAFT_LOOP](given)
    assert alone.num_rounds and alone.num_published
    assert alone.seconds is not None
    frozen = contenders.CONTENDERS[names.DRAFT_LOOP](given).seconds
    assert frozen is not None
    assert alone.seconds[-48:].sum() < 0.95 * frozen[-48:].sum()
    first = int(np.flatnonzero(alone.cpu_s)[0])
    assert first > 8
    assert (alone.seconds[: first - 4] == frozen[: first - 4]).all(), "nothing else proposes"


def test_every_arm_has_its_contender() -> None:
    known = {**contenders.CONTENDERS, **rivals.RIVALS}
    assert set(online.ARMS) <= known.keys()
    offline = {arm for arm in online.ARMS if arm.startswith(("ceiling", "one draft for all"))}
    assert offline == set(names.TRAINED_OFFLINE), "else the first draft would serve under that name"


def test_without_its_package_no_arm_asks_for_suffix_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online.importlib.util, "find_spec", lambda name: None)
    found = online.protocol(Options(directory=tmp_path))
    assert [arm for arm in online.ARMS if arm not in found.arms] == [
        names.SUFFIX_LOOP,
        names.MIXED_SUFFIX_LOOP,
    ]
    assert set(found.sizes["left_out"]) == {names.SUFFIX_LOOP, names.MIXED_SUFFIX_LOOP}


@pytest.mark.parametrize("arm", [*names.MIXED_RIVALS, names.MIXED_LEAST])
def test_every_rival_of_sampled_drafts_draws_them_too(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    class MadeError(Exception):
        """With the loop's configuration and memory."""

    def make(requests: object, config: Config, *_: object, memory: object = None, **__: object):  # type: ignore[no-untyped-def]
        raise MadeError(config, memory)

    for module in (contenders, rivals):
        monkeypatch.setattr(module, "ClosedLoop", make)
    monkeypatch.setattr(contenders, "SuffixMemory", lambda *_: "suffix decoding")
    given = replace(a_setup(draft, tmp_path, 16), times=published())
    with pytest.raises(MadeError) as made:
        rivals.RIVALS[arm](given)
    config, memory = made.value.args
    assert config.speculation.is_sampled
    assert config.speculation.proposers == given.config.speculation.proposers
    assert memory == ("suffix decoding" if arm == names.MIXED_SUFFIX_LOOP else None)
    growth = given.config.trainer.max_replay_growth
    assert config.trainer.max_replay_growth == (1 if arm == names.MIXED_LEAST else growth)


@pytest.mark.parametrize("arm", [names.MIXED_NIGHTLY, list(names.MIXED_OSD)[-1]])
def test_rivals_with_sampled_drafts_learn_too(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setattr(rivals, "NIGHT", 48)
    loops, make = list[Setup](), rivals._loop
    monkeypatch.setattr(rivals, "_loop", lambda setup: loops.append(setup) or make(setup))
    setup = timed(draft, tmp_path, 160)
    found, frozen = (rivals.RIVALS[name](setup) for name in (arm, names.MIXED_FROZEN_LOOP))
    assert [loop.config.speculation.is_sampled for loop in loops] == [True, True]
    assert found.seconds is not None and frozen.seconds is not None
    assert found.seconds[-48:].sum() < 0.95 * frozen.seconds[-48:].sum()
