"""Training curves for TensorBoard or Weights & Biases, one point per round, by Accelerate's
trackers.

    Trainer.run_round ─log─► queue ─► a thread per tracker: start, log, finish

A tracker loads, writes and waits in its own thread, so training neither waits for it nor fails with
it.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from osd.config.schema import TrainerConfig
from osd.errors import ConfigError
from osd.records import RoundOutcome

logger = logging.getLogger(__name__)

PROJECT = "osd"
"""Project of the runs in Weights & Biases."""
NUM_WAITING = 64
"""Points that may wait for a tracker. A tracker that is further behind is turned off."""
SECONDS_TO_FINISH = 10.0
FIGURES_ONLY = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
}
"""Settings of Weights & Biases that keep the trainer's output, command line, code and machine from
being uploaded."""

Point = dict[str, float | str]


def check_installed(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker whose package, of the same name, is not installed."""
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            raise ConfigError(
                f"trainer.trackers: {name}: the package {name} is not installed; `pip install "
                f"{name}`, or leave it out"
            ) from None


def point(outcome: RoundOutcome, num_tokens: int) -> Point:
    """The point of a round that trained on `num_tokens` tokens, without what was not measured."""
    trained: dict[str, float | None] = {}
    if outcome.num_steps:
        trained = {
            "loss/first": outcome.loss_first,
            "loss/last": outcome.loss_last,
            "loss/holdout_before": outcome.holdout_loss_before,
            "loss/holdout_after": outcome.holdout_loss_after,
            "alpha/base": outcome.eval.alpha_base if outcome.eval else None,
            "alpha/predicted": outcome.eval.alpha_candidate if outcome.eval else None,
            "learning_rate": outcome.learning_rate,
            "tokens_per_second": num_tokens / outcome.seconds,
            "rows": outcome.num_tokens,
            "seconds": outcome.seconds,
            **_of_sampling(outcome),
        }
    measured: Point = {name: value for name, value in trained.items() if value is not None}
    return measured | {
        "is_candidate": float(not outcome.discarded),
        "outcome": outcome.discarded or "candidate",
    }


def _of_sampling(outcome: RoundOutcome) -> dict[str, float | None]:
    if not outcome.num_student_traces:
        return {}
    return {
        "student_traces": outcome.num_student_traces,
        "cpu_seconds/sampling": outcome.sampling_cpu_s,
        "cpu_seconds/scoring": outcome.scoring_cpu_s,
    }


def open_trackers(config: TrainerConfig, directory: Path, target_id: str) -> list[Tracker]:
    """The trackers of `trainer.trackers`, for the trainer whose checkpoints are in `directory`.

    The run's name tells the trainers apart that share a `trainer.tracker_dir`. Raises `ConfigError`
    for a tracker that is not installed.
    """
    check_installed(config.trackers)
    where = Path(config.tracker_dir).expanduser() if config.tracker_dir else directory / "curves"
    own = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:6]
    return [Tracker(name, where, f"{target_id}-{own}") for name in config.trackers]


class Tracker:
    """One of Accelerate's trackers behind a queue. A failure turns it off and is logged once.

    It starts with the first point, after the trainer has told Accelerate which device is used.
    """

    def __init__(self, name: str, directory: Path, run: str) -> None:
        self._name, self._directory, self._run = name, directory, run
        self._waiting: queue.Queue[tuple[int, Point] | None] = queue.Queue(NUM_WAITING)
        self._thread: threading.Thread | None = None
        self._is_on = True

    def log(self, step: int, values: Point) -> None:
        """Queue a point; returns at once."""
        if not self._is_on:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"tracker {self._name}", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            self._give_up(f"it is {NUM_WAITING} rounds behind")

    def close(self) -> None:
        """Let the tracker write what waits, for at most `SECONDS_TO_FINISH`."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(SECONDS_TO_FINISH)

    def _work(self) -> None:
        try:
            tracker = self._start()
            while (item := self._waiting.get()) is not None:
                step, values = item
                tracker.log(values, step=step)
            tracker.finish()
        except Exception as error:  # noqa: BLE001  a broken tracker must not stop training
            self._give_up(f"{type(error).__name__}: {error}")

    def _start(self) -> Any:
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        self._directory.mkdir(parents=True, exist_ok=True)
        tracker: TensorBoardTracker | WandBTracker
        if self._name == "tensorboard":
            tracker = TensorBoardTracker(self._run, logging_dir=self._directory)
        else:
            tracker = WandBTracker(
                PROJECT, name=self._run, dir=str(self._directory), settings=FIGURES_ONLY
            )
        tracker.start()
        return tracker

    def _give_up(self, reason: str) -> None:
        if self._is_on:
            self._is_on = False
            logger.warning(
                "no more curves for %s until the trainer starts again: %s", self._name, reason
            )
