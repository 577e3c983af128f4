"""What a run of the demo found: the figures of `--report`."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from osd.client.load import Answer, figures
from osd.common import machine
from osd.demo.report import course
from osd.demo.story import (
    NUM_AFTER,
    NUM_BEFORE,
    NUM_RECOVERED,
    NUM_TIMED,
    SHIFTED,
    STREAMS,
    Story,
)
from osd.records import Counters, SpecWindow, SwapReport, conditional_acceptance
from osd.service.launch import Service
from osd.tiny.traffic import HOME


def report_of(story: Story, service: Service, seconds: float) -> dict[str, Any]:
    """The report of `--report`, as plain JSON."""
    runs_of = _windows(story)
    windows = {name: figures([a for run in runs for a in run]) for name, runs in runs_of.items()}
    arms = {
        "no_speculation": figures(story.plain, story.seconds["plain"]),
        "static_draft": figures(story.static, story.seconds["static"]),
        "adapted_draft": figures(story.adapted, story.seconds["adapted"]),
    }
    everything = _all_answers(story)
    speculation = service.config.speculation
    return {
        "schema_version": 2,
        "speculation_mode": speculation.mode,
        "k_max": speculation.k_max,
        "streams": STREAMS,
        "k": {name: _rounded(f.k, 2) for name, f in windows.items()},
        "acceptance_rate": {name: _rounded(f.acceptance_rate) for name, f in windows.items()},
        "alpha": {name: _rounded(alpha(story.windows, runs)) for name, runs in runs_of.items()},
        "token_shares": {name: token_shares(story.windows, runs) for name, runs in runs_of.items()},
        "tokens_per_second": {name: _rounded(f.tokens_per_second, 1) for name, f in arms.items()},
        "tpot_ms": {name: _rounded(f.tpot_ms, 2) for name, f in arms.items()},
        "requests": len(everything),
        "failed_requests": sum(not a.ok for a in everything),
        **_swap_figures(story.swaps),
        "releases": [
            {
                "version": draft.version,
                "bad": draft.bad,
                "predicted_alpha": _rounded(draft.predicted_alpha),
                "served_alpha": _rounded(draft.served_alpha),
            }
            for draft in story.drafts
        ],
        "lossless": story.num_different == 0 if story.num_compared else None,
        "compared": story.num_compared,
        "draft_version": story.version,
        "target_parameters": _num_parameters(service.plan.target_dir),
        "seconds": round(seconds, 1),
        "course": course(
            [(HOME, story.home), (SHIFTED, story.shifted)], story.swaps, story.windows
        ),
        "machine": machine.describe(),
        "versions": _versions(),
    }


def _windows(story: Story) -> dict[str, list[list[Answer]]]:
    """The answers of each window, by runs without a pause."""
    half = NUM_TIMED // 2
    return {
        "before_shift": [story.home[-NUM_BEFORE:]],
        "after_shift": [story.shifted[:NUM_AFTER]],
        "recovered": [story.shifted[-NUM_RECOVERED:]],
        "static_control": [story.static[:half], story.static[half:], story.static_untimed],
    }


def _all_answers(story: Story) -> list[Answer]:
    timed = [*story.adapted, *story.static, *story.plain]
    return [*story.home, *story.shifted, *timed, *story.static_untimed, *story.plain_untimed]


def _swap_figures(swaps: Sequence[SwapReport]) -> dict[str, Any]:
    done = [s for s in swaps if s.ok]
    pauses = sorted(1000 * s.pause_s for s in done)
    return {
        "swaps": len(pauses),
        "swap_pause_ms": {
            "p50": _rounded(statistics.median(pauses), 2) if pauses else None,
            "max": _rounded(pauses[-1], 2) if pauses else None,
        },
        "swaps_proved": all(s.proved for s in done) if done else None,
    }


def alpha(windows: Sequence[SpecWindow], runs: Sequence[Sequence[Answer]]) -> float | None:
    """Conditional acceptance from the engine's own counts during these runs. Where k changes, the
    answers do not tell which draft tokens were tested."""
    counted = _during(windows, runs)
    accepted = sum(sum(w.num_accepted_tokens_per_pos) for w in counted)
    return conditional_acceptance(accepted, sum(sum(w.num_tested_per_pos) for w in counted))


def token_shares(
    windows: Sequence[SpecWindow], runs: Sequence[Sequence[Answer]]
) -> dict[str, float] | None:
    """Who brought which share of the output tokens during these runs, by the engine's own counts
    (`SOURCES`); None without any."""
    total = Counters()
    for window in _during(windows, runs):
        total.add(window.counters)
    shares = total.shares()
    return {name: round(share, 3) for name, share in shares.items()} or None


def _during(windows: Sequence[SpecWindow], runs: Sequence[Sequence[Answer]]) -> list[SpecWindow]:
    spans = [
        (min(a.started for a in run), max(a.started + a.seconds for a in run))
        for run in runs
        if run
    ]
    return [w for w in windows if any(start < w.at - w.seconds / 2 < end for start, end in spans)]


def _versions() -> dict[str, str]:
    from serving.vllm.names import engine_version

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "ray", "redis")},
        "engine": engine_version(),
    }


def _num_parameters(directory: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118
                total += prod(weights.get_slice(name).get_shape())
    return total


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
