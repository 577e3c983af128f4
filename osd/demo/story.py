"""`osd demo`: the whole loop on this machine, with tiny models and real vLLM.

    home traffic ──► the traffic shifts ──► the draft learns ──► training pauses ──► controls on the same requests
    (the draft's      acceptance and         and is swapped       (nothing moves      frozen first draft · adapted
     own domain)       speed fall             in, live             while measuring)    draft · no speculation

It starts the service exactly as `osd serve` does and is its client. No request names its domain.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from osd.client.http import Client
from osd.client.load import Answer, Figures, drive, figures
from osd.common import machine
from osd.config import reading
from osd.config.schema import Config
from osd.demo.report import course, html, summary
from osd.errors import ConfigError, OSDError
from osd.exchange.registry import Registry
from osd.records import SpecWindow, SwapReport, conditional_acceptance
from osd.service.launch import Service
from osd.tiny.traffic import HOME, requests

PRESET = Path(__file__).resolve().parents[2] / "configs" / "tiny-cpu.yaml"
SHIFTED = "sql"
SEED = 20_000
"""Traffic seed of demo runs; the models were trained on others."""
STREAMS = 4
NUM_HOME, NUM_SHIFTED = 120, 264
NUM_BEFORE, NUM_AFTER, NUM_RECOVERED = 100, 50, 100
LINE_EVERY = 24
"""Requests per printed line."""
NUM_TIMED = 40
"""Of the last window, so many requests are timed in every arm; the others are only counted, and sent more at a time."""
STREAMS_UNTIMED = 16
SECONDS_TO_REPORT = 2.0
"""By when replicas have reported what they served."""
NUM_MORE_COMPARED = 16
"""Answers from the time of shift and swaps that are compared, besides those of the last window."""


@dataclass(slots=True)
class Story:
    """What the run has seen so far."""

    home: list[Answer] = field(default_factory=list)
    shifted: list[Answer] = field(default_factory=list)
    adapted: list[Answer] = field(default_factory=list)
    static: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)
    static_untimed: list[Answer] = field(default_factory=list)
    plain_untimed: list[Answer] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    swaps: list[SwapReport] = field(default_factory=list)
    windows: list[SpecWindow] = field(default_factory=list)
    drafts: list[dict[str, Any]] = field(default_factory=list)
    """Every release, as the control port describes it."""
    num_compared: int = 0
    num_different: int = 0
    version: int = 0


def run(
    *,
    report_path: Path | None,
    html_path: Path | None = None,
    keep: bool,
    overrides: Sequence[str] = (),
    out: TextIO = sys.stdout,
) -> int:
    """Run the demo; the exit status is 0 when no request failed and every compared answer was identical."""
    started = time.time()
    for flag, path in (("--report", report_path), ("--html", html_path)):
        if path is not None:
            check_writable(flag, path)
    directory = Path(tempfile.mkdtemp(prefix="osd-demo-"))
    screen = Screen(out, started)
    service = None
    try:
        service = Service(demo_config(directory, overrides), screen.say)
        story = asyncio.run(_play(service, screen))
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
    """Raise `ConfigError` unless the file can be written; it is left as it was."""
    directory, is_new = path.resolve().parent, not path.exists()
    if not directory.is_dir():
        raise ConfigError(f"{flag} {path}: no such directory {directory}")
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror}); name another file") from None
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
        # The same prompts are sent again to measure; a prefix cache would favour whoever saw them first.
        "serving.vllm.enable_prefix_caching=false",
        "serving.vllm.per_request_spec_decode_metrics=summary",
    ]
    return reading.load(PRESET, [*own, *overrides]).config


async def _play(service: Service, screen: Screen) -> Story:
    story = Story()
    service.launch()
    plain = service.start_replica("plain", None)
    service.wait()
    plain_url = service.wait_for(plain, "plain", "engine without speculation")
    screen.say(f"dashboard: {service.control_url}/dashboard (while this runs)")
    await _live_traffic(service, screen, story)
    await _controls(service, plain_url, screen, story)
    return story


async def _live_traffic(service: Service, screen: Screen, story: Story) -> None:
    """Home traffic, then the shift; the service does what it always does."""
    registry = Registry(service.redis_url, service.config.deployment)
    model = service.config.serving.served_model_name
    for title, domain, count, answers in (
        (f"home traffic ({HOME})", HOME, NUM_HOME, story.home),
        (f"the traffic shifts ({SHIFTED})", SHIFTED, NUM_SHIFTED, story.shifted),
    ):
        screen.title(title)

        def on_answer(answer: Answer, answers: list[Answer] = answers) -> None:
            answers.append(answer)
            if len(answers) % LINE_EVERY == 0:
                _read_swaps(registry, story)
                screen.line(len(answers), answers[-LINE_EVERY:], story.swaps)

        prompts = [r.prompt for r in requests(domain, count, SEED)]
        answers[:] = await drive(
            service.url, model, prompts, streams=STREAMS, api_key=service.config.serving.api_key, on_answer=on_answer
        )
    _read_swaps(registry, story)
    registry.close()


def _read_swaps(registry: Registry, story: Story) -> None:
    try:
        story.swaps = [record for _, record in registry.read("0", 100_000) if isinstance(record, SwapReport)]
    except OSDError:
        return


async def _controls(service: Service, plain_url: str, screen: Screen, story: Story) -> None:
    """The requests of the last window again: adapted draft, frozen first draft, no speculation, in turns."""
    screen.title("controls: training paused, the last requests again")
    client = Client(service.control_url, token=service.token)
    client.admin("pause")
    await asyncio.sleep(2)  # a round in flight ends
    story.version = client.get("/osd/status")["version"]
    story.drafts = client.get("/osd/drafts")
    prompts = [r.prompt for r in requests(SHIFTED, NUM_SHIFTED, SEED)]
    first = NUM_SHIFTED - NUM_RECOVERED
    half = NUM_TIMED // 2
    frozen = service.plan.release.version
    model, api_key = service.config.serving.served_model_name, service.config.serving.api_key
    for start, arms in ((first, ("adapted", "static", "plain")), (first + half, ("plain", "static", "adapted"))):
        for arm in arms:
            if arm != "plain":
                await _serve_version(client, story.version if arm == "adapted" else frozen)
            url = plain_url if arm == "plain" else service.url
            clock = time.perf_counter()
            answers = await drive(url, model, prompts[start : start + half], streams=STREAMS, api_key=api_key)
            story.seconds[arm] = story.seconds.get(arm, 0.0) + time.perf_counter() - clock
            getattr(story, arm).extend(answers)
    screen.say("comparing answers given across the shift and the swaps with those of the engine without speculation")
    await _serve_version(client, frozen)
    untimed = prompts[first + NUM_TIMED :]
    others = list(range(0, first, max(1, first // NUM_MORE_COMPARED)))
    story.static_untimed, answers = await asyncio.gather(
        drive(service.url, model, untimed, streams=STREAMS_UNTIMED, api_key=api_key),
        drive(plain_url, model, untimed + [prompts[i] for i in others], streams=STREAMS_UNTIMED, api_key=api_key),
    )
    story.plain_untimed, again = answers[: len(untimed)], answers[len(untimed) :]
    live = [story.shifted[i] for i in others] + story.shifted[first:]
    _compare(story, [*zip(live, [*again, *story.plain, *story.plain_untimed], strict=True)])
    _compare(story, [*zip(story.adapted, story.plain, strict=True)])
    _compare(story, [*zip(story.static, story.plain, strict=True)])
    _compare(story, [*zip(story.static_untimed, story.plain_untimed, strict=True)])
    await asyncio.sleep(SECONDS_TO_REPORT)
    registry = Registry(service.redis_url, service.config.deployment)
    with suppress(OSDError):  # then α is not known, and all else is
        story.windows = [record for _, record in registry.read("0", 100_000) if isinstance(record, SpecWindow)]
    registry.close()


async def _serve_version(client: Client, version: int) -> None:
    """Pin a version and wait until every replica serves it."""
    client.admin("pin", version=version)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        replicas = client.get("/osd/status")["replicas"]
        if replicas and all(r["version"] == version for r in replicas):
            return
        await asyncio.sleep(0.2)
    raise OSDError(f"no replica served v{version} within 60 s")


def _compare(story: Story, pairs: Sequence[tuple[Answer, Answer]]) -> None:
    both = [(a, b) for a, b in pairs if a.ok and b.ok]
    story.num_compared += len(both)
    story.num_different += sum(a.token_ids != b.token_ids for a, b in both)


def report_of(story: Story, service: Service, seconds: float) -> dict[str, Any]:
    """The report of `--report`."""
    answers = {
        "before_shift": [story.home[-NUM_BEFORE:]],
        "after_shift": [story.shifted[:NUM_AFTER]],
        "recovered": [story.shifted[-NUM_RECOVERED:]],
        "static_control": [story.static[: NUM_TIMED // 2], story.static[NUM_TIMED // 2 :], story.static_untimed],
    }
    windows = {name: figures([a for run in runs for a in run]) for name, runs in answers.items()}
    arms = {
        "no_speculation": figures(story.plain, story.seconds["plain"]),
        "static_draft": figures(story.static, story.seconds["static"]),
        "adapted_draft": figures(story.adapted, story.seconds["adapted"]),
    }
    timed = [*story.adapted, *story.static, *story.plain]
    everything = [*story.home, *story.shifted, *timed, *story.static_untimed, *story.plain_untimed]
    pauses = sorted(1000 * s.pause_s for s in story.swaps if s.ok)
    return {
        "schema_version": 2,
        "speculation_mode": service.config.speculation.mode,
        "k_max": service.config.speculation.k_max,
        "streams": STREAMS,
        "k": {name: _rounded(f.k, 2) for name, f in windows.items()},
        "acceptance_rate": {name: _rounded(f.acceptance_rate) for name, f in windows.items()},
        "alpha": {name: _rounded(alpha(story.windows, runs)) for name, runs in answers.items()},
        "tokens_per_second": {name: _rounded(f.tokens_per_second, 1) for name, f in arms.items()},
        "tpot_ms": {name: _rounded(f.tpot_ms, 2) for name, f in arms.items()},
        "requests": len(everything),
        "failed_requests": sum(not a.ok for a in everything),
        "swaps": len(pauses),
        "swap_pause_ms": {
            "p50": _rounded(statistics.median(pauses), 2) if pauses else None,
            "max": _rounded(pauses[-1], 2) if pauses else None,
        },
        "swaps_proved": all(s.proved for s in story.swaps if s.ok) if pauses else None,
        "releases": [
            {"version": d["version"], "bad": d["bad"]}
            | {name: _rounded(d[name]) for name in ("predicted_alpha", "served_alpha")}
            for d in story.drafts
        ],
        "lossless": story.num_different == 0 if story.num_compared else None,
        "compared": story.num_compared,
        "draft_version": story.version,
        "target_parameters": _num_parameters(service.plan.target_dir),
        "seconds": round(seconds, 1),
        "course": course([(HOME, story.home), (SHIFTED, story.shifted)], story.swaps),
        "machine": machine.describe(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "ray", "redis")},
            "engine": _engine_version(),
        },
    }


def alpha(windows: Sequence[SpecWindow], runs: Sequence[Sequence[Answer]]) -> float | None:
    """What the service counted while these answers, several runs without a pause, were given: which tokens were tested
    cannot be told from answers where k changes."""
    spans = [(min(a.started for a in run), max(a.started + a.seconds for a in run)) for run in runs if run]
    counted = [w for w in windows if any(start < w.at - w.seconds / 2 < end for start, end in spans)]
    accepted = sum(sum(w.num_accepted_tokens_per_pos) for w in counted)
    return conditional_acceptance(accepted, sum(sum(w.num_tested_per_pos) for w in counted))


def _engine_version() -> str:
    from serving.vllm.names import engine_version

    return engine_version()


def _num_parameters(directory: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118
                size = 1
                for length in weights.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


class Screen:
    """What a person sees: lines of plain text, so that it reads the same in a terminal and in a log."""

    WIDTH = 30

    def __init__(self, out: TextIO, started: float) -> None:
        self._out = out
        self._started = started
        self._shown_swaps = 0

    def say(self, text: str) -> None:
        print(f"[{time.time() - self._started:4.0f} s] {text}", file=self._out, flush=True)

    def title(self, text: str) -> None:
        self.say("")
        self.say(text)

    def line(self, count: int, answers: Sequence[Answer], swaps: Sequence[SwapReport]) -> None:
        """One line per `LINE_EVERY` requests: acceptance as a bar, speed beside it, a mark for each swap."""
        shown: Figures = figures(answers)
        rate = shown.acceptance_rate or 0.0
        bar = "█" * round(rate * self.WIDTH)
        marks = "".join(f"  ◆ v{s.version}" for s in swaps[self._shown_swaps :] if s.ok)
        self._shown_swaps = len(swaps)
        self.say(
            f"{count:4d}  acceptance {rate:4.2f} {bar:<{self.WIDTH}} k {shown.k or 0:3.1f} "
            f"{shown.tokens_per_second:5.0f} tok/s"
            f"{marks}{'  FAILED ' + str(shown.num_failed) if shown.num_failed else ''}"
        )

    def summary(self, report: dict[str, Any]) -> None:
        self.title("summary")
        for name, found in summary(report).items():
            self.say(f"{name:<18}{found}")
