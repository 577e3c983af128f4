"""Training curves: what a real event file holds, and what is refused at the start.

No tracker holds training up.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from osd.config import reading
from osd.errors import ConfigError
from osd.offline import train
from osd.records import NO_TRACES, RoundOutcome
from osd.service.launch import Service
from tests.support.tiny_drafts import TARGET_ID, chain_traces, release_of, save_draft
from tests.support.tiny_rounds import buffer_with, config, trainer_at
from trainer.trackers import NUM_WAITING, Tracker, check_installed, point


def is_absent(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return True
    return False


def only(directory: Path) -> Path:
    """The one run in it, named after target and trainer."""
    (run,) = directory.iterdir()
    assert run.name.startswith(f"{TARGET_ID}-")
    return run


def read(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def test_each_rounds_figures_stand_in_the_event_file(tmp_path: Path) -> None:
    base = release_of(save_draft(tmp_path / "base"))
    buffer = buffer_with(*chain_traces(32), *chain_traces(12, start=500, holdout=True))
    trainer = trainer_at(tmp_path / "t", buffer, trackers=["tensorboard"])
    first = trainer.run_round(base)
    buffer.put(chain_traces(32, start=40))
    second, third = trainer.run_round(base), trainer.run_round(base)
    writers = [thread for thread in threading.enumerate() if thread.name == "tracker tensorboard"]
    trainer.close()
    assert any(not writer.is_alive() for writer in writers), "all is written"
    assert third.discarded == NO_TRACES

    events = read(only(tmp_path / "t" / "curves"))

    def curve(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    for name, field in {
        "loss/first": "loss_first",
        "loss/last": "loss_last",
        "loss/holdout_before": "holdout_loss_before",
        "loss/holdout_after": "holdout_loss_after",
        "learning_rate": "learning_rate",
        "rows": "num_tokens",
        "seconds": "seconds",
    }.items():
        assert curve(name) == pytest.approx(
            {1: getattr(first, field), 2: getattr(second, field)}
        ), name
    assert first.eval is not None and second.eval is not None
    assert curve("alpha/base") == pytest.approx(
        {1: first.eval.alpha_base, 2: second.eval.alpha_base}
    )
    assert curve("alpha/predicted") == pytest.approx(
        {1: first.eval.alpha_candidate, 2: second.eval.alpha_candidate}
    )
    # 32 new traces and 128 replayed ones in each round, of which 15 tokens are fed.
    assert curve("tokens_per_second")[1] * first.seconds == pytest.approx(160 * 15, rel=1e-3)
    assert curve("tokens_per_second")[2] * second.seconds == pytest.approx(160 * 15, rel=1e-3)
    assert curve("is_candidate") == {1: 1, 2: 1, 3: 0}
    outcomes = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("outcome/text_summary")
    ]
    assert outcomes == ["candidate", "candidate", NO_TRACES]


def test_what_student_sampling_took_is_drawn_where_there_was_any() -> None:
    plain = RoundOutcome(
        base_version=1,
        path="here",
        num_steps=8,
        num_tokens=9,
        loss_first=2.0,
        loss_last=1.0,
        seconds=3.0,
        trace_age_mean_s=1.0,
        trace_age_max_s=1.0,
        eval=None,
    )
    sampled = replace(plain, num_student_traces=36, sampling_cpu_s=1.5, scoring_cpu_s=0.5)
    drawn = point(sampled, 90).items() - point(plain, 90).items()
    assert dict(drawn) == {
        "student_traces": 36,
        "cpu_seconds/sampling": 1.5,
        "cpu_seconds/scoring": 0.5,
    }


def test_offline_training_leaves_its_curves_beside_the_draft(tmp_path: Path) -> None:
    from tests.unit.osd.offline.test_train import HELD_OUT, SETTINGS, TRAINING, write

    given = [*SETTINGS, "trainer.trackers=[tensorboard]"]
    settings = reading.load(
        None, given, {"serving.draft": str(save_draft(tmp_path / "draft"))}, {}
    ).config
    draft = train.check_draft(settings)
    job = train.Job(config=settings, draft=draft, out=tmp_path / "new", epochs=2, force=True)
    assert train.run(job, [write(tmp_path / "all.traces", TRAINING + HELD_OUT)], print, print) == 0
    assert read(only(tmp_path / "new.curves")).Scalars("loss/last")


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path / "t", buffer_with(*chain_traces(8)))
    trainer.run_round(release_of(save_draft(tmp_path / "base")))
    trainer.close()
    assert not (tmp_path / "t" / "curves").exists()


# What is refused


def test_the_missing_package_is_named_with_the_remedy() -> None:
    check_installed(["tensorboard"])
    with pytest.raises(ConfigError) as raised:
        check_installed(["tensorboard", "osd-no-such-tracker"])
    assert str(raised.value) == (
        "trainer.trackers: osd-no-such-tracker: the package osd-no-such-tracker is not installed; "
        "`pip install osd-no-such-tracker`, or leave it out"
    )


@pytest.mark.skipif(not is_absent("wandb"), reason="wandb is installed here")
def test_an_absent_tracker_is_refused_before_anything_starts(tmp_path: Path) -> None:
    flags = {
        "serving.draft": str(save_draft(tmp_path / "draft")),
        "data_dir": str(tmp_path / "data"),
    }
    settings = reading.load(None, ["trainer.trackers=[wandb]"], flags, {}).config
    for start in (
        lambda: Service(settings),
        lambda: train.check_draft(settings),
        lambda: trainer_at(tmp_path / "t", buffer_with(), trackers=["wandb"]),
    ):
        with pytest.raises(ConfigError, match="pip install wandb"):
            start()
    assert not (tmp_path / "data").exists()


def test_an_unknown_tracker_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match="tensorboard"):
        config(trackers=["mlflow"])


# What goes wrong later


def test_a_tracker_that_fails_is_off_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    buffer = buffer_with(*chain_traces(32))
    trainer = trainer_at(
        tmp_path / "t", buffer, trackers=["tensorboard"], tracker_dir=str(tmp_path / "file" / "x")
    )
    base = release_of(save_draft(tmp_path / "base"))
    with caplog.at_level(logging.WARNING, "trainer.trackers"):
        for start in (100, 200, 300):
            assert trainer.run_round(base).discarded == ""
            buffer.put(chain_traces(8, start=start))
        trainer.close()
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "no more curves for tensorboard until the trainer starts again"
    ]


class Stuck(Tracker):
    """A tracker that waits for a server."""

    released = threading.Event()

    def _start(self) -> Any:
        self.released.wait()
        raise OSError("gone")


def test_a_tracker_that_hangs_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Stuck("wandb", tmp_path, "run")
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "trainer.trackers"):
        for step in range(NUM_WAITING + 10):
            tracker.log(step, {"loss/last": 1.0})
        assert time.monotonic() - started < 1
        tracker.released.set()
        tracker.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"no more curves for wandb until the trainer starts again: it is {NUM_WAITING} rounds "
        "behind"
    ]
