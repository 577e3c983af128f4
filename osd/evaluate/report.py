"""The report of an evaluation: one HTML file, drawn by the demo's charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from osd.evaluate.bound.own import Bound
from osd.evaluate.bound.speeds import fixed_name
from osd.evaluate.figures import NUM_PLACES, QUANTILES, Figures
from osd.evaluate.plan import NONE
from osd.evaluate.success import Success
from osd.evaluate.table import HEADER, NOTES, groups, row_of, said_of_bound, verdicts
from osd.observe.report_page import Chart, Line, columns, draw, page, section, table, text


def html(
    figures: Sequence[Figures],
    bounds: Sequence[Bound],
    successes: Sequence[Success],
    measured: Mapping[str, Any],
) -> str:
    """The page. `measured`: on what, and with which settings."""
    return page(
        "osd evaluate",
        "What each way to speculate gains on this target, measured on real vLLM.",
        [
            section("Found", *map(text, [*_best(figures), *verdicts(figures)])),
            *(
                section(group, *_of_load([figures[i] for i in places]))
                for group, places in groups(figures).items()
            ),
            *_of_bounds(bounds, figures),
            *_of_trees(successes),
            section("How to read it", *map(text, (*NOTES, *_READING))),
            section("Measured on", table(measured)),
        ],
    )


_READING = (
    "Speed: tokens/s over none, by the length of drafts. Acceptance by draft position: of the "
    "draft tokens at a place of the draft that were tested, the share that was accepted "
    "(conditional acceptance, α). By place in the answer: the same by tenths of each answer. By "
    "request: how α spreads over requests.",
    "Arms of one engine served the same requests in turns, so they are compared in pairs. none of "
    "each engine is the reference of its arms.",
)


def _of_bounds(bounds: Sequence[Bound], figures: Sequence[Figures]) -> list[str]:
    if not bounds:
        return []
    measured = {
        (one.load, one.temperature, fixed_name(one.method, one.k)): one.over_none.value
        for one in figures
        if one.over_none is not None
    }
    rows = [
        (bound.load, f"{bound.temperature:g}", rule, f"{speed:.2f}",
         _said(measured.get((bound.load, bound.temperature, rule))))
        for bound in bounds
        for rule, speed in bound.speeds.items()
    ]  # fmt: skip
    return [
        section(
            "What is left to gain",
            text(_OF_BOUNDS),
            *(text(said_of_bound(bound, figures)) for bound in bounds),
            columns(("load", "temperature", "rule", "computed", "measured"), rows),
        )
    ]


_OF_BOUNDS = (
    "Speed over no speculation, computed from what each proposer would have had at every position "
    "of the answers and from what the steps took. An oracle knows what will be accepted, and pays "
    "like everybody else."
)


def _of_trees(successes: Sequence[Success]) -> list[str]:
    if not successes:
        return []
    lines = {
        f"{one.data}, temperature {one.temperature:g}": dict(enumerate(one.by_k, 1))
        for one in successes
    }
    ks = sorted({k for by_k in lines.values() for k in by_k})
    chart = _chart("The draft's k likeliest hold the served token", "k", ks, lines)
    rows = [(name, *(f"{by_k[k]:.3f}" for k in ks)) for name, by_k in lines.items()]
    return [
        section(
            "Success by k of the draft model",
            text("What a token tree of width k could gain over a chain; see docs/trees.md."),
            *([draw(chart)] if chart else []),
            columns(("answers", *(f"k = {k}" for k in ks)), rows),
        )
    ]


def _best(figures: Sequence[Figures]) -> list[str]:
    """What to choose at each load."""
    said = []
    for group, places in groups(figures).items():
        arms = [figures[i] for i in places if figures[i].over_none is not None]
        if not arms:
            continue
        best = max(arms, key=lambda one: one.over_none.value if one.over_none else 0.0)
        assert best.over_none is not None
        gain = best.over_none.value
        words = f"{best.arm.name}, {gain:.2f} times as fast as none"
        said.append(f"{group}: {words if gain > 1 else f'none; the best arm is {words}'}")
    return said


def _of_load(figures: Sequence[Figures]) -> list[str]:
    drafting = [one for one in figures if one.acceptance_length is not None]
    charts = [_speed(figures), _by_position(drafting), _by_place(drafting)]
    spread = [(one.arm.name, *(f"{value:.2f}" for value in one.by_request)) for one in drafting]
    by_data = [
        (one.arm.name, of.data, str(of.num_requests), _said(of.acceptance_length), _said(of.alpha),
         f"{1000 * of.tpot.p50:.1f}")
        for one in figures
        for of in one.by_data
    ]  # fmt: skip
    return [
        columns(HEADER, map(row_of, figures)),
        *(draw(chart) for chart in charts if chart is not None),
        text("α by request, quantiles"),
        columns(("method", *(f"{q:.0%}" for q in QUANTILES)), spread),
        text("By data set"),
        columns(("method", "data set", "requests", "length", "α", "TPOT p50 ms"), by_data),
    ]


def _speed(figures: Sequence[Figures]) -> Chart | None:
    arms = [one for one in figures if one.method != NONE and one.over_none is not None]
    lengths = sorted({one.k for one in arms})
    lines = {
        method: {
            one.k: one.over_none.value for one in arms if one.method == method and one.over_none
        }
        for method in dict.fromkeys(one.method for one in arms)
    }
    return _chart("Speed over none", "draft tokens of a step", lengths, lines)


def _by_position(figures: Sequence[Figures]) -> Chart | None:
    longest = max((one.k for one in figures), default=0)
    lines = {
        one.arm.name: dict(enumerate(one.by_draft_position.alpha, 1))
        for one in figures
        if one.k == longest
    }
    x = range(1, longest + 1)
    return _chart("Acceptance by draft position", "position in the draft", x, lines)


def _by_place(figures: Sequence[Figures]) -> Chart | None:
    lines = {one.arm.name: dict(enumerate(one.by_output_place.alpha)) for one in figures}
    shares = {i: i / NUM_PLACES for i in range(NUM_PLACES)}
    placed = {
        name: {shares[i]: value for i, value in values.items()} for name, values in lines.items()
    }
    return _chart(
        "Acceptance by place in the answer", "share of the answer", shares.values(), placed
    )


def _chart(
    title: str, x_label: str, x: Iterable[float], lines: Mapping[str, Mapping[Any, float | None]]
) -> Chart | None:
    at = tuple(x)
    if not at or not lines:
        return None
    return Chart(
        title=title,
        x_label=x_label,
        y_label=title,
        x=at,
        lines=tuple(
            Line(label=name, values=tuple(map(values.get, at))) for name, values in lines.items()
        ),
        span_gaps=True,
    )


def _said(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
