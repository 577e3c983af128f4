"""The jobs of the drift benchmark's processes: record, train a ceiling, run one contender over one
schedule.

Importing this module loads nothing heavy; each process sets its number of threads first.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

from benchmarks.drift import names
from benchmarks.record import Notebook, Row
from benchmarks.replays.step_times import WIDTHS, ModelledStepTimes, measure
from benchmarks.traffic.family import FAMILIES, FIRST_SERVED, TRAINING
from benchmarks.traffic.schedule import Schedule, arrivals
from osd.config.schema import Config

PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"

FEATURE_BYTES = 1 << 30
"""Of features kept while a head is trained offline: its texts come in every pass."""


def prepare() -> None:
    """To be called first in a process: one thread, so that two processes share two cores. The
    process ends with the run that started it, also where that is killed, and what it holds is
    cleaned up where it is told to end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    if run := parent_process():
        run.join()
        os._exit(1)


def base_config() -> Config:
    """The settings all contenders share: the tiny preset, whatever the environment says."""
    from osd.config.reading import load

    return load(PRESET, environ={}).config


def step_times(notebook: Notebook, cycles: int, say: Callable[[str], None]) -> list[Row]:
    """The times of steps of the cost-shaped target on this machine: measured now, in a process of
    its own, unless the notebook has all of them."""
    whole = cycles * (len(WIDTHS) + 1)
    timed = [row for row in notebook.rows if "step_s" in row]
    if len(timed) < whole:
        say("timing steps of the cost-shaped target")
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=prepare
        ) as process:
            timed = [notebook.add(**row) for row in process.submit(measure, cycles).result()]
    return timed[-whole:]


def record_stream(family: str, domain: str, block: int, num: int) -> None:
    """Have a stream's recording in the cache."""
    from benchmarks.traffic.recordings import take

    one_thread()
    take(family, domain, block, num)


def ceiling(family: str, domains: Sequence[str], num: int) -> Path:
    """The ceiling's draft for a set of domains, learnt from `num` requests of each, from the cache
    or trained now."""
    from benchmarks.drift import contenders
    from benchmarks.replays import served
    from benchmarks.traffic import recordings
    from osd.models.resolve import fingerprint
    from osd.tiny.cache import build_once

    one_thread()
    config = base_config()
    target, draft = FAMILIES[family].models()
    sources = [
        *sorted(Path(contenders.__file__).parents[2].glob("trainer/**/*.py")),
        Path(contenders.__file__),
    ]
    digest = hashlib.sha256(config.trainer.model_dump_json().encode())
    for part in (fingerprint(target), fingerprint(draft), family, *sorted(domains), str(num)):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.read_bytes())

    def build(directory: Path) -> None:
        requests = [r for d in sorted(domains) for r in recordings.take(family, d, TRAINING, num)]
        features = served.features_of(target, config.speculation.k_max, FEATURE_BYTES)
        contenders.train_ceiling(config, draft, requests, directory / "draft", features)

    return build_once(f"ceilings/{digest.hexdigest()[:16]}", build) / "draft"


def run_one(
    name: str,
    schedule: Schedule,
    seed: int,
    contender: str,
    ceiling_requests: int,
    times: ModelledStepTimes | None = None,
) -> Row:
    """One contender over one schedule, from the cached recordings; the ceiling learnt from so many
    of each domain."""
    from benchmarks.drift import contenders, rivals
    from benchmarks.traffic import recordings

    one_thread()
    coming = arrivals(schedule, name, seed)
    target, draft = FAMILIES[schedule.family].models()
    if contender in names.TRAINED_OFFLINE:
        draft = ceiling(schedule.family, schedule.domains, ceiling_requests)
    with tempfile.TemporaryDirectory(prefix="osd-drift-") as directory:
        setup = contenders.Setup(
            config=base_config(),
            draft=draft,
            requests=recordings.in_order(schedule.family, FIRST_SERVED + seed, coming),
            arrivals=[arrival.at for arrival in coming],
            directory=Path(directory),
            seed=seed,
            target=target,
            times=times,
        )
        curve = (contenders.CONTENDERS | rivals.RIVALS)[contender](setup)
    return {"schedule": name, "seed": seed, "contender": contender, **curve.as_row()}


def one_thread() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
