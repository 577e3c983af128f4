"""Contenders of the drift benchmark on a target with a planted language.

What each learns, from what, and when.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.drift import contenders, names
from benchmarks.replays.charged import ChargedTraining
from benchmarks.replays.curve import Curve
from benchmarks.replays.learning import learn
from benchmarks.replays.recording import Recorded
from benchmarks.traffic.recordings import load, save
from osd.config.schema import CaptureConfig, Config, GateConfig, SpeculationConfig, TrainerConfig
from osd.records import RoundOutcome
from tests.support.tiny_drafts import chain_trace, save_draft
from trainer.loop import Trainer


def recorded(num: int, *, start: int = 0, step: int = 5) -> list[Recorded]:
    """Requests of the planted language, or with another step of another one, 24 tokens each."""
    found = []
    for index in range(start, start + num):
        trace = chain_trace(index, num_output=24, step=step)
        found.append(
            Recorded(
                name=str(index),
                prompt_ids=trace.prompt_ids,
                output_ids=trace.output_ids,
                target_ids=trace.target_ids,
                target_logprobs=trace.target_logprobs,
                tail_logprob=trace.tail_logprob,
            )
        )
    return found


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft(tmp_path_factory.mktemp("draft") / "draft")


def a_setup(draft: Path, directory: Path, num: int = 64, **trainer: Any) -> contenders.Setup:
    settings: dict[str, Any] = {
        "device": "cpu",
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_length": 64,
        "min_new_traces": 16,
    }
    return contenders.Setup(
        config=Config(
            trainer=TrainerConfig(**(settings | trainer)),
            gate=GateConfig(min_holdout_traces=2),
            speculation=SpeculationConfig(k_max=4),
            capture=CaptureConfig(accepted_fraction=1, plain_fraction=1),
        ),
        draft=draft,
        requests=recorded(num),
        arrivals=[float(index) for index in range(num)],
        directory=directory,
        seed=0,
    )


def test_a_frozen_draft_meets_every_request_alike(draft: Path, tmp_path: Path) -> None:
    curve = contenders.CONTENDERS[names.FROZEN](a_setup(draft, tmp_path, 20))
    assert (len(curve), curve.num_rounds, curve.cpu_s[-1]) == (20, 0, 0.0)
    assert curve.alpha() < 0.2
    assert curve.total("tokens") == 20 * 23


def test_osd_makes_a_step_every_so_many_requests_and_serves_what_it_learnt(
    draft: Path, tmp_path: Path
) -> None:
    setup = a_setup(draft, tmp_path, 160)
    curve = contenders.osd(setup, every=8, learning_rate=1e-2)
    assert 10 <= curve.num_rounds <= 20  # none where nothing was rejected
    assert curve.alpha(140, 160) > 0.8 > 0.2 > curve.alpha(0, 8)
    assert (np.diff(curve.cpu_s) >= 0).all()
    assert curve.cpu_s[6] == 0.0 < curve.cpu_s[7]
    slow = contenders.osd(setup, every=8, learning_rate=1e-6)
    assert slow.num_rounds == 20
    assert slow.alpha(140, 160) < 0.2


def test_osd_learns_from_rejected_positions_alone(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osd.records import REJECTED
    from trainer.distiller import Distiller

    seen = []
    collate = Distiller.collate

    def spy(self: Distiller, traces: Any) -> Any:
        seen.extend(traces)
        return collate(self, traces)

    monkeypatch.setattr(Distiller, "collate", spy)
    setup = a_setup(draft, tmp_path, 16)
    curve = contenders.osd(setup, every=8, learning_rate=1e-6)
    assert {int(kind) for trace in seen for kind in trace.kind} == {REJECTED}
    assert sum(trace.num_rows for trace in seen) == curve.total("tested") - curve.total("accepted")
    assert {trace.domain for trace in seen} == {""}


def test_ours_goes_through_rounds_and_the_gate(draft: Path, tmp_path: Path) -> None:
    curve = contenders.ours(a_setup(draft, tmp_path, 120))
    assert curve.num_rounds >= 3
    assert 1 <= curve.num_published <= curve.num_rounds
    assert curve.alpha(100, 120) > curve.alpha(0, 20) + 0.3


def test_lora_is_trained_as_lora(draft: Path, tmp_path: Path) -> None:
    curve = contenders.CONTENDERS[names.OURS_LORA](a_setup(draft, tmp_path, 40))
    assert curve.num_rounds == 2


def test_the_ceiling_knows_the_language(draft: Path, tmp_path: Path) -> None:
    setup = a_setup(draft, tmp_path)
    contenders.train_ceiling(setup.config, draft, recorded(64, start=1000), tmp_path / "ceiling")
    assert contenders.fixed(replace(setup, draft=tmp_path / "ceiling")).alpha() > 0.9


def test_every_name_has_its_contender() -> None:
    assert tuple(contenders.CONTENDERS) == (
        *names.ALL,
        *names.SOURCES,
        names.CHARGED,
        *names.STOPPED,
        *names.SAMPLED,
    )


def test_whose_text_is_learnt_and_what_sampling_took(draft: Path, tmp_path: Path) -> None:
    """A target that knows another language than the recorded answers shows who was asked."""
    target = save_draft(tmp_path / "target", seed=3, scale=0.3)
    alphas = {}
    for arm in (names.OURS, *names.SAMPLED):
        (tmp_path / arm).mkdir()
        setup = replace(a_setup(draft, tmp_path / arm, 40), target=target)
        curve = contenders.CONTENDERS[arm](setup)
        assert curve.num_rounds == 2
        num_trained = (16 + 16) * (1 + setup.config.trainer.replay_batches)
        share = {names.OURS: 0, names.OURS_MIXED: 0.5, names.OURS_STUDENT: 1}[arm]
        assert curve.notes["num_traces"] == share * num_trained
        spent = [curve.notes["sampling_cpu_s"], curve.notes["scoring_cpu_s"]]
        assert min(spent) > 0 if share else spent == [0, 0]
        assert sum(spent) < curve.cpu_s[-1]
        alphas[arm] = curve.alpha(32)
    assert alphas[names.OURS] > alphas[names.OURS_STUDENT] + 0.2


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    kept = recorded(5)
    save(kept, tmp_path / "requests.npz")
    again = load(tmp_path / "requests.npz", temperature=0.7)
    assert {request.temperature for request in again} == {0.7}
    for one, other in zip(kept, again, strict=True):
        assert one.name == other.name
        for name in ("prompt_ids", "output_ids", "target_ids", "target_logprobs", "tail_logprob"):
            left, right = getattr(one, name), getattr(other, name)
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)


def test_counts_of_a_curve_do_not_depend_on_who_asks(draft: Path, tmp_path: Path) -> None:
    """A draft that never learns and a learner whose gate never opens serve the same."""
    setup = a_setup(draft, tmp_path, 40)
    shut = setup.config.model_copy(update={"gate": GateConfig(min_holdout_traces=64)})
    learner: Curve = contenders.ours(replace(setup, config=shut))
    frozen = contenders.fixed(setup)
    assert learner.num_published == 0
    assert learner.num_rounds == 2
    assert {n: v.tolist() for n, v in learner.counts.items()} == {
        n: v.tolist() for n, v in frozen.counts.items()
    }


@pytest.mark.parametrize(("may_rest", "replayed"), [(False, [2, 2, 2]), (True, [2, 8, 8])])
def test_where_training_takes_no_time_rounds_replay_the_most(
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    may_rest: bool,
    replayed: list[int],
) -> None:
    seen: list[int | None] = []
    run_round = Trainer.run_round

    def spy(self: Trainer, *arguments: Any, **options: Any) -> RoundOutcome:
        seen.append(options["size"].replay_batches)
        return run_round(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "run_round", spy)
    setup = a_setup(draft, tmp_path, 60, replay_batches=2, max_replay_growth=4)
    learn(setup.config, draft, setup.requests, tmp_path / "run", seed=0, may_rest=may_rest)
    assert seen == replayed


class NeverPays:
    """A trainer that rests for its price from the 40th request on; told how often the traffic has
    changed."""

    def __init__(self) -> None:
        self.num_wakes = list[int]()

    @property
    def rests_for_price(self) -> bool:
        return len(self.num_wakes) >= 40

    is_resting, now = rests_for_price, 0.0

    def pays(self, num_wakes: int, *, has_rested: bool) -> bool:
        assert has_rested is self.is_resting
        self.num_wakes.append(num_wakes)
        return False

    def note_recall(self) -> None:
        pass


def test_a_trainer_that_rests_for_its_price_is_told_of_other_traffic(
    draft: Path, tmp_path: Path
) -> None:
    setup = a_setup(draft, tmp_path)
    contenders.train_ceiling(setup.config, draft, recorded(64, start=1000), tmp_path / "knows")
    requests, charged = [*recorded(60), *recorded(60, step=7)], NeverPays()
    learn(
        *(setup.config, tmp_path / "knows", requests, tmp_path / "run"),
        seed=0,
        may_rest=True,
        charged=cast(ChargedTraining, charged),
    )
    assert len(charged.num_wakes) == 120
    assert charged.num_wakes[59] == 0 < charged.num_wakes[-1]
