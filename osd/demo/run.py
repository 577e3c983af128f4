"""`osd demo`: starts a service as `osd serve` does, lets the story play, reports, and cleans up."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from osd.config import reading
from osd.config.schema import Config
from osd.demo.findings import report_of
from osd.demo.report import html
from osd.demo.screen import Screen
from osd.demo.story import play
from osd.errors import ConfigError
from osd.service.launch import Service

LEARNERS: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "eagle3": (
        "serving.target=tiny-deep-cost-shaped",
        "serving.draft=tiny-eagle3-cost-shaped",
        "speculation.k_max=3",
        # A token of training is dear, as a head is trained at every depth and the target's hidden
        # states are computed first: rounds of fewer tokens, in more steps.
        "trainer.learning_rate=1e-3",
        "trainer.batch_size=4",
        "trainer.replay_batches=4",
        "trainer.max_new_traces=48",
    ),
}
"""What learns, and what it changes in the preset."""
PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"


def run(
    *,
    report_path: Path | None,
    html_path: Path | None = None,
    keep: bool,
    learner: Sequence[str] = LEARNERS["model"],
    overrides: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> int:
    """Run the demo. The exit status is 0 when no request failed and every compared answer was
    identical."""
    started = time.time()
    for flag, path in (("--report", report_path), ("--html", html_path)):
        if path is not None:
            check_writable(flag, path)
    directory = Path(tempfile.mkdtemp(prefix="osd-demo-"))
    screen = Screen(out, started)
    service = None
    try:
        service = Service(demo_config(directory, [*learner, *overrides]), screen.say)
        story = asyncio.run(play(service, screen))
        report = report_of(story, service, time.time() - started)
    finally:
        if service is not None:
            service.stop()
        if keep:
            screen.say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    screen.summary(report)
    if report_path is not None:
        report_path.write_text(json.dumps(report, indent=2) + "\n")
    if html_path is not None:
        html_path.write_text(html(report), encoding="utf-8")
        screen.say(f"charts: {html_path}")
    return 0 if report["failed_requests"] == 0 and report["lossless"] else 1


def check_writable(flag: str, path: Path) -> None:
    """Raise `ConfigError` unless the file can be written. The file stays as it was."""
    directory, is_new = path.resolve().parent, not path.exists()
    if not directory.is_dir():
        raise ConfigError(f"{flag} {path}: no such directory {directory}")
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be written ({error.strerror}); name another file"
        ) from None
    if is_new:
        path.unlink()


def demo_config(directory: Path, overrides: Sequence[str]) -> Config:
    """The tiny preset on free ports, with its data in `directory`."""
    if not PRESET.is_file():
        raise ConfigError(f"{PRESET}: not found; run the demo from a checkout of the project")
    own = [
        f"deployment=demo-{directory.name[-8:].lower().replace('_', '-').strip('-')}",
        f"data_dir={directory}",
        "serving.port=0",
        "control.port=0",
        # It shows a draft that learns. A memory of such text would need none of it.
        "speculation.proposers=[draft]",
        # The controls send the same prompts to the service again. A prefix cache would make the
        # later arms faster.
        "serving.vllm.enable_prefix_caching=false",
        "serving.vllm.per_request_spec_decode_metrics=summary",
    ]
    return reading.load(PRESET, [*own, *overrides]).config
