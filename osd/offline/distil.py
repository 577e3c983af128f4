"""`osd distil`: trains a draft before there is any traffic, on the target's answers to prompts.

    prompts ─► answering.py ─► file of traces ─► train.py
               (the service, capturing everything, without a trainer)

Training begins after the service has ended, since it may need the engine's memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.errors import OSDError
from osd.offline import recorded, train
from osd.offline.prompts import Asking, read_prompts
from osd.offline.recorded import Say
from osd.records import HOLDOUT_ONE_IN


def settings(data_dir: Path) -> dict[str, Any]:
    """Keys that `osd distil` sets, whatever configuration was given: everything is captured, and
    nothing outlives the run."""
    return {
        "deployment": f"distil-{random.randrange(16**8):08x}",
        "data_dir": str(data_dir),
        "releases.dir": "",
        "buffer.redis_url": "",
        "serving.port": 0,
        "control.port": 0,
        "trainer.enabled": False,
        # Always propose, also where it does not pay: the draft learns from rejected tokens.
        "speculation.mode": "fixed",
        "speculation.proposers": ["draft"],
        "capture.enabled": True,
        "capture.accepted_fraction": 1.0,
        "capture.plain_fraction": 1.0,
        "capture.max_bytes_per_second": 1 << 40,
    }


def run(
    load: Callable[[dict[str, Any]], Config],
    *,
    prompts_file: Path,
    out: Path,
    keep_traces: Path | None,
    asking: Asking,
    epochs: int,
    force: bool,
    say: Say,
    warn: Say,
) -> int:
    """Record, then train. Returns the exit status.

    load: reads the configuration, with the given keys set
    """
    train.check_out(out)
    if keep_traces is not None:
        recorded.check_new_file(keep_traces, "--keep-traces", force)
    prompts = read_prompts(prompts_file)
    with train.workplace(out) as work:
        config = load(settings(work))
        expected = len(prompts) // HOLDOUT_ONE_IN
        train.check_holdout(
            expected,
            f"--prompts: {prompts_file}: {len(prompts)} prompts: about",
            config.gate,
            force,
        )
        job = train.Job(
            config=config, draft=train.check_draft(config), out=out, epochs=epochs, force=force
        )
        traces = keep_traces or work / "traces"
        from osd.offline import answering  # loads torch, which the checks above do not need

        try:
            answering.record(config, prompts, asking, traces, say)
        except OSDError as error:
            raise type(error)(_with_logs_kept(str(error), config, out)) from None
        if keep_traces is not None:
            say(f"traces: {keep_traces}, for `osd train`")
        return train.run(job, [traces], say, warn)


def _with_logs_kept(text: str, config: Config, out: Path) -> str:
    """The error's text, with its logs moved to a place that outlives the run."""
    logs, kept = config.data_path / "logs", train.free_name(out, "logs")
    if not logs.is_dir():
        return text
    logs.rename(kept)
    return text.replace(str(logs), str(kept))
