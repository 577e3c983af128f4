"""`osd profile`: starts an engine as `osd serve` does, measures its steps, keeps and prints them.

The table shows T(batch, k), the time of a step that drafts k tokens and verifies them, and the
*target efficiency* T(1)/T(k+1) (MoESD, arXiv 2505.19645): the target's time for one token over its
time for k + 1. When it is low, as for mixture-of-experts targets at small batches, verification is
not free and k stays small.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.errors import OSDError
from osd.service.plan import plan

WORKER = "osd.service.profile_worker.SilentWorker"
BATCHES = (1, 4, 16, 64)
SECONDS_TO_END = 30

Say = Callable[[str], None]


def run(config: Config, *, again: bool, say: Say) -> None:
    """Measure, or read an earlier measurement, and print it. Raises `OSDError` when the engine does
    not start."""
    with tempfile.TemporaryDirectory(prefix="osd-profile-") as data:
        changes = {
            "mode": "auto",
            "calibration_seconds": config.speculation.calibration_seconds or 20.0,
        }
        config = config.model_copy(
            update={
                "data_dir": data,
                "releases": config.releases.model_copy(update={"dir": ""}),
                "serving": config.serving.model_copy(update={"port": 0}),
                "control": config.control.model_copy(update={"port": 0}),
                "speculation": config.speculation.model_copy(update=changes),
            }
        )
        rows, path = _in_a_process(config, again, say)
    if not rows:
        raise OSDError(
            "no step was measured; speculation.calibration_seconds may be too short for this target"
        )
    say(table(rows, config.speculation.k_max))
    say(
        f"kept in {path}"
        if Path(path).exists()
        else "not kept: speculation.calibration_seconds was too short for all"
    )


def _in_a_process(config: Config, again: bool, say: Say) -> tuple[list[dict[str, Any]], str]:
    """Measure in another process, where the engine gets its environment and which ends it.

    Returns the rows of step times and the path of the profile.
    """
    made = plan(config)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(made, again, there), daemon=False)
    say("starting the engine")
    child.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        raise OSDError("the engine ended before it was measured") from None
    finally:
        child.join(SECONDS_TO_END + 5)
        if child.is_alive():
            child.kill()
    if isinstance(found, str):
        raise OSDError(found)
    return found


def _measure(made: Any, again: bool, answer: Any) -> None:
    import os

    os.environ.update(made.config.serving.env)
    from serving.vllm import server

    server.prepare_environment()
    from serving.replica import Replica
    from serving.speculation.profile import profile_path

    path: Path = profile_path(made.config, made.target_id, made.release.path)
    if again:
        path.unlink(missing_ok=True)
    try:
        replica = Replica(
            made.config,
            name="profile",
            target_dir=str(made.target_dir),
            target_id=made.target_id,
            draft_release=made.release,
            registry=None,
            worker_extension=WORKER,
            sink={},
        )
        replica.wait_ready()
        answer.send((replica.step_times(), str(path)))
        replica.close()
        replica.join(SECONDS_TO_END)
    except BaseException as error:  # noqa: BLE001  the waiting process reports it
        answer.send(str(error) or type(error).__name__)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of vLLM


def table(rows: Sequence[dict[str, Any]], k_max: int) -> str:
    """Step times in milliseconds and target efficiency, by batch and k."""
    from serving.speculation.step_times import Shape, StepTimes

    times = StepTimes()
    times.load_rows(rows)
    largest = max(row["batch"] for row in rows)
    context = max(row["context"] // row["batch"] for row in rows)
    ks = range(k_max + 1)
    lines = [f"{'step, ms':>10}" + "".join(f"{f'k = {k}':>9}" for k in ks) + f"{'T(1)/T(k+1)':>16}"]
    for batch in (b for b in BATCHES if b <= largest):
        steps = times.predict([Shape(batch, batch * (1 + k), batch * context, k) for k in ks])
        bare = times.predict(
            [Shape(batch, batch * (1 + k), batch * context, 0) for k in (0, k_max)]
        )
        cells = "".join(f"{1000 * s:9.1f}" for s in steps)
        lines.append(f"{f'batch {batch}':>10}{cells}{bare[0] / bare[1]:>11.2f} (k = {k_max})")
    return "\n".join(lines)
