"""The report of `--report` as lines for the screen and as a page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from osd.client.load import Answer, figures
from osd.observe.report_page import Chart, Line, Mark, draw, page, section, table, text
from osd.records import SOURCES, Counters, SpecWindow, SwapReport

POINT_EVERY = 12
"""Requests per point of a chart."""
SOURCE_COLORS = {"target": "--load", "draft": "--rate", "memory": "--memory"}


def course(
    phases: Sequence[tuple[str, Sequence[Answer]]],
    swaps: Sequence[SwapReport],
    windows: Sequence[SpecWindow] = (),
) -> dict[str, Any]:
    """How the live traffic went: columns over seconds since the first request, and marks.

    `phases`: each kind of traffic in order, by name, with its answers. A mark is a new draft (swap)
    or another kind of traffic (shift). `windows`: what the engine counted meanwhile.
    """
    began = min(a.started for _, answers in phases for a in answers)
    points = _points(phases, began, windows)
    columns = {name: [point[name] for point in points] for name in points[0]}
    return columns | {"marks": _marks(phases, swaps, began)}


def _points(
    phases: Sequence[tuple[str, Sequence[Answer]]], began: float, windows: Sequence[SpecWindow]
) -> list[dict[str, Any]]:
    points: list[dict[str, float | None]] = []
    num_requests = 0
    for _, answers in phases:
        ordered = sorted(answers, key=_end)
        blocks = [ordered[i : i + POINT_EVERY] for i in range(0, len(ordered), POINT_EVERY)]
        ends = [min(a.started for a in answers), *(_end(block[-1]) for block in blocks)]
        for block, (start, end) in zip(blocks, pairwise(ends), strict=True):
            found = figures(block, end - start)
            num_requests += len(block)
            points.append(
                {
                    "seconds": round((start + end) / 2 - began, 2),
                    "requests": num_requests,
                    "acceptance_rate": found.acceptance_rate,
                    "k": found.k,
                    "tokens_per_second": found.tokens_per_second,
                    "tpot_ms": found.tpot_ms,
                    **_tokens_per_step(windows, start, end),
                }
            )
    return points


def _tokens_per_step(
    windows: Sequence[SpecWindow], start: float, end: float
) -> dict[str, float | None]:
    """Tokens that a step of a request yielded, by who brought them; None without any step."""
    total = Counters()
    for window in windows:
        if start <= window.at - window.seconds / 2 < end:
            total.add(window.counters)
    tokens = total.by_source()
    return {
        f"tokens_{name}": round(tokens[name] / total.num_steps, 3) if total.num_steps else None
        for name in SOURCES
    }


def _marks(
    phases: Sequence[tuple[str, Sequence[Answer]]], swaps: Sequence[SwapReport], began: float
) -> list[dict[str, Any]]:
    ended = max(_end(a) for _, answers in phases for a in answers)
    marks: list[dict[str, Any]] = [
        {
            "at": round(min(a.started for a in answers) - began, 2),
            "label": f"traffic: {name}",
            "kind": "shift",
        }
        for name, answers in phases[1:]
    ]
    marks += [
        {"at": round(s.at - began, 2), "label": f"v{s.version}", "kind": "swap"}
        for s in swaps
        if s.ok and began <= s.at <= ended
    ]
    return sorted(marks, key=lambda mark: mark["at"])


def summary(report: dict[str, Any]) -> dict[str, str]:
    """The table at the end: name -> what was found."""
    rate, speed, tpot, k = (
        report[name] for name in ("acceptance_rate", "tokens_per_second", "tpot_ms", "k")
    )
    static, plain = speed["static_draft"] or 1, speed["no_speculation"] or 1
    pause, releases = report["swap_pause_ms"], report["releases"]
    num_millions = report["target_parameters"] / 1e6
    return {
        "acceptance rate": f"at home {rate['before_shift']}   after the shift "
        f"{rate['after_shift']}   recovered {rate['recovered']}   "
        f"(frozen first draft, same requests: {rate['static_control']})",
        "k chosen": f"at home {k['before_shift']}   after the shift {k['after_shift']}   "
        f"recovered {k['recovered']}   "
        f"(frozen first draft: {k['static_control']}; of a draft at most {report['k_max']})",
        "tokens/s": f"adapted draft {speed['adapted_draft']}   "
        f"frozen draft {speed['static_draft']}   no speculation {speed['no_speculation']}   "
        f"({report['streams']} streams, same requests, training paused)",
        "TPOT": f"adapted draft {tpot['adapted_draft']} ms   "
        f"frozen draft {tpot['static_draft']} ms   no speculation {tpot['no_speculation']} ms",
        "tokens by source": _by_source(report["token_shares"]),
        "speed-up": f"{speed['adapted_draft'] / plain:.2f}x over no speculation, "
        f"{speed['adapted_draft'] / static:.2f}x over the frozen draft",
        "swaps": f"{report['swaps']} while serving; the engine was blocked "
        f"{pause['p50']} ms (median), {pause['max']} ms (longest)"
        + ("; each read back and found equal" if report["swaps_proved"] else ""),
        "predicted α": f"of the releases, and served: {_kept_promises(releases)}",
        "answers": f"{report['compared']} compared with the engine without speculation: "
        + ("all identical, token for token" if report["lossless"] else "DIFFERENT"),
        "requests": f"{report['requests']}, failed {report['failed_requests']}",
        "target": f"the project's own tiny model widened to {num_millions:.0f} M parameters: "
        "same answers, a real model's cost; not a model anyone would deploy",
    }


def html(report: dict[str, Any]) -> str:
    """The report as a page."""
    machine = {
        name: value
        for name, value in report["machine"].items()
        if name not in ("versions", "python")
    }
    return page(
        "osd demo",
        "Tiny models, real vLLM: the traffic changes while it is served, acceptance and speed "
        "fall, and come back as the draft learns.",
        [
            section("While serving", *map(draw, _charts(report["course"])), text(_READING)),
            section("Found", table(summary(report))),
            section("What the target is", text(_TARGET)),
            section(
                "Measured on", table(machine | report["versions"] | {"seconds": report["seconds"]})
            ),
        ],
    )


_READING = (
    f"A point is {POINT_EVERY} requests. A solid line is where the traffic changed, a dashed one "
    "where a new draft was swapped in. Engine and trainer share the machine here; speeds to "
    "compare, with training paused, stand below. Acceptance rate: accepted / drafted tokens. "
    "k: draft tokens proposed per step of a request. Tokens per step: output tokens by who brought "
    "them. TPOT: time per output token after the first."
)
_TARGET = (
    "A cost-shaped copy of a tiny model: the same function, widened with zeros and idle layers, so "
    "that an engine step costs what a real model's does. Speed-ups are real, on that target; they "
    "say nothing about another."
)


def _charts(course: dict[str, Any]) -> tuple[Chart, ...]:
    def line(name: str, label: str, **options: Any) -> Line:
        return Line(label=label, values=tuple(course[name]), **options)

    def chart(title: str, *lines: Line, height: int = 170) -> Chart:
        marks = tuple(Mark(**mark) for mark in course["marks"])
        return Chart(
            title=title,
            x_label="seconds",
            x=tuple(course["seconds"]),
            lines=lines,
            marks=marks,
            notes=tuple(f"{n} requests" for n in course["requests"]),
            height=height,
            group="demo",
        )

    return (
        chart(
            "Acceptance", line("acceptance_rate", "acceptance rate", color="--alpha"), height=260
        ),
        chart(
            "Speed",
            line("tokens_per_second", "tokens/s", color="--speed", digits=1),
            line("tpot_ms", "TPOT", color="--tpot", unit=" ms", right=True, dashed=True),
            height=200,
        ),
        chart("Draft tokens", line("k", "k", color="--k")),
        chart(
            "Tokens by source",
            *(
                line(f"tokens_{name}", f"{name}, tokens per step", color=color)
                for name, color in SOURCE_COLORS.items()
                if any(course[f"tokens_{name}"])
            ),
        ),
    )


def _end(answer: Answer) -> float:
    return answer.started + answer.seconds


def _by_source(shares: dict[str, dict[str, float] | None]) -> str:
    """Like "at home target 35 %, draft 65 %   after the shift target 78 %, draft 22 %"."""
    names = {"before_shift": "at home", "after_shift": "after the shift", "recovered": "recovered"}
    said = []
    for window, words in names.items():
        found = {name: share for name, share in (shares[window] or {}).items() if share}
        brought = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.items())
        said.append(f"{words} {brought or 'not counted'}")
    return "   ".join(said)


def _kept_promises(releases: Sequence[dict[str, Any]]) -> str:
    """Like "v2 0.41 and 0.39, v3 0.62 and 0.64": the newest three with both figures."""
    known = [
        r for r in releases if r["predicted_alpha"] is not None and r["served_alpha"] is not None
    ]
    shown = [
        f"v{r['version']} {r['predicted_alpha']:.2f} and {r['served_alpha']:.2f}"
        for r in known[-3:]
    ]
    return ", ".join(shown) or "none"
