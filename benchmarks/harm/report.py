"""From the rows of `osd bench harm` to its figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.drift.jobs import base_config
from benchmarks.record import Protocol, Row
from benchmarks.result import Figure, Lines, Result

WINDOW = 100
"""Requests of the rest over which α is compared."""
AGAINST = {
    "frozen": "α on the rest, learnt - frozen, worst window",
    "unpoisoned": "α on the rest, learnt - learnt without poison, worst window",
}

AVERAGED = "averaged"
WITH = "α on the rest, learnt and averaged - frozen, worst window"
"""What poison does where candidates are weights averaged over rounds."""

GAINED = "α on the other domain, learnt - frozen"
"""What is poisoned must still be learnt from, else nothing was at stake."""


def summarise(plan: Protocol, rows: Sequence[Row]) -> Result:
    """One group of figures per scenario; the worst of the seeds where a goal is a bound."""
    figures: list[Figure] = []
    for name in ("poisoned", "sly", "hostile"):
        mine = [row for row in rows if row["scenario"] == name]
        others = [other for other in AGAINST if other in mine[0]]
        figures += [
            *(
                Figure(
                    group=name,
                    name=AGAINST[other],
                    value=min(min(differences(row, other)) for row in mine),
                    n=len(mine),
                )
                for other in others
            ),
            *_means(name, mine, {f"α on the rest, {arm}": arm for arm in _arms(mine[0])}),
            Figure(
                group=name,
                name="rounds",
                value=float(np.mean([row["rounds"] for row in mine])),
                n=len(mine),
            ),
            Figure(
                group=name,
                name="publications",
                value=float(np.mean([len(row["published_at"]) for row in mine])),
                n=len(mine),
            ),
        ]
        if AVERAGED in mine[0]:
            worst = min(min(differences(row, "frozen", AVERAGED)) for row in mine)
            figures.append(Figure(group=name, name=WITH, value=worst, n=len(mine)))
        if name != "hostile":
            gains = [
                alpha(row["learnt"], row["rest"][-1]) - alpha(row["frozen"], row["rest"][-1])
                for row in mine
            ]
            figures.append(Figure(group=name, name=GAINED, value=min(gains), n=len(gains)))
    figures += _return(plan, [row for row in rows if row["scenario"] == "return"])
    figures += _steady(plan, [row for row in rows if row["scenario"] == "steady"])
    return Result(
        protocol=plan,
        figures=tuple(figures),
        drawings=tuple(_drawing(rows, name) for name in dict.fromkeys(r["scenario"] for r in rows)),
    )


def alpha(counts: dict[str, list[int]], places: Sequence[int]) -> float:
    """Conditional acceptance over some requests."""
    tested = sum(counts["tested"][i] for i in places)
    return sum(counts["accepted"][i] for i in places) / max(tested, 1)


def _arms(row: Row) -> list[str]:
    return [arm for arm, counts in row.items() if isinstance(counts, dict)]


def differences(row: Row, other: str, learnt: str = "learnt") -> list[float]:
    """α learnt less that of the other draft, in each window of each kind of the rest."""
    windows = [
        places[i : i + WINDOW]
        for places in row["rest"]
        for i in range(0, len(places) - WINDOW + 1, WINDOW // 2)
    ]
    return [alpha(row[learnt], w) - alpha(row[other], w) for w in windows]


def _means(group: str, rows: Sequence[Row], names: dict[str, str]) -> list[Figure]:
    kinds = range(len(rows[0]["rest"]))
    return [
        Figure(
            group=group,
            name=name + (f", kind {kind + 1}" if len(kinds) > 1 else ""),
            value=float(np.mean([alpha(r[arm], r["rest"][kind]) for r in rows])),
            n=len(rows),
        )
        for name, arm in names.items()
        for kind in kinds
    ]


def _return(plan: Protocol, rows: Sequence[Row]) -> list[Figure]:
    home, other = plan.sizes["home_before"], plan.sizes["other"]
    before, reached = range(home - min(home, 100), home), range(home + other - 100, home + other)
    at_once = range(home + other, home + other + min(50, plan.sizes["home_after"]))
    kept = [alpha(r["learnt"], at_once) / alpha(r["learnt"], before) for r in rows]
    learnt = [alpha(r["learnt"], reached) / alpha(r["ceiling"], reached) for r in rows]
    return [
        Figure(
            group="return", name="α at once on return over α before", value=min(kept), n=len(kept)
        ),
        Figure(
            group="return",
            name="α reached on the other domain over its ceiling",
            value=min(learnt),
            n=len(rows),
        ),
        Figure(
            group="return",
            name="α reached on the other domain, mean",
            value=float(np.mean([alpha(r["learnt"], reached) for r in rows])),
            n=len(rows),
        ),
    ]


def _steady(plan: Protocol, rows: Sequence[Row]) -> list[Figure]:
    half = plan.sizes["steady"] // 2
    late = [sum(at >= half for at in row["published_at"]) for row in rows]
    return [
        Figure(
            group="steady", name="publications in the second half", value=max(late), n=len(rows)
        ),
        Figure(
            group="steady",
            name="rounds",
            value=float(np.mean([row["rounds"] for row in rows])),
            n=len(rows),
        ),
        Figure(
            group="steady",
            name="rounds if training never rested",
            value=plan.sizes["steady"] // base_config().trainer.min_new_traces,
            n=len(rows),
        ),
    ]


def _drawing(rows: Sequence[Row], name: str) -> Lines:
    row = next(row for row in rows if row["scenario"] == name)
    places = sorted(place for kind in row["rest"] for place in kind)
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for arm in ("learnt", AVERAGED, "frozen", "ceiling"):
        if arm in row:
            windows = [places[max(0, i - 24) : i + 1] for i in range(24, len(places), 8)]
            lines[arm] = tuple((float(w[-1]), alpha(row[arm], w)) for w in windows)
    return Lines(
        title=f"{name}: α over the last 25 requests of the rest",
        x_label="request",
        y_label="α",
        lines=lines,
    )
