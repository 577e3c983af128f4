"""The metrics of speculation. Each living replica, the first label, reports its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from osd.observe.metrics import Samples, Series, by_label, known
from osd.records import PlanTotals, SpeculationFigures

OfFigures = Callable[[SpeculationFigures], Samples]
TESTED, ACCEPTED = 0, 1


def _speculation(name: str, text: str, read: OfFigures, *labels: str) -> Series:
    kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
    return Series(name, kind, text, ("replica", *labels), SpeculationFigures, read)


def _plans(value: Callable[[PlanTotals], float]) -> OfFigures:
    return lambda figures: [((plan,), value(totals)) for plan, totals in figures.plans.items()]


def _by_position(which: int) -> OfFigures:
    return lambda figures: [((str(i),), pair[which]) for i, pair in enumerate(figures.positions)]


def _by_context(which: int) -> OfFigures:
    return lambda figures: [((name,), pair[which]) for name, pair in figures.contexts.items()]


def _net_ratio(figures: SpeculationFigures) -> Samples:
    ends = {"mean": figures.net_ratio, "low": figures.net_low, "high": figures.net_high}
    return [((bound,), value) for bound, value in ends.items() if value is not None]


SPECULATION = (
    _speculation(
        "osd_speculation_steps_total",
        "Pure decoding steps by what was speculated.",
        _plans(lambda totals: totals.steps),
        "plan",
    ),
    _speculation(
        "osd_speculation_seconds_total",
        "Time of these steps.",
        _plans(lambda totals: totals.seconds),
        "plan",
    ),
    _speculation(
        "osd_speculation_tokens_total",
        "Tokens these steps brought.",
        _plans(lambda totals: totals.tokens),
        "plan",
    ),
    _speculation(
        "osd_step_seconds_total",
        "Host time of the worker by part of a step.",
        lambda figures: by_label(figures.seconds_per_part),
        "part",
    ),
    _speculation(
        "osd_speculation_probes_total",
        "Times an unused draft was tried.",
        lambda figures: known(figures.num_probes),
    ),
    _speculation(
        "osd_speculation_undrafted_requests_total",
        "Requests that are not drafted for, by the parameter that forbids it.",
        lambda figures: by_label(figures.undrafted),
        "reason",
    ),
    _speculation(
        "osd_speculation_verified_tokens_total",
        "Tokens verified, by who proposed them (draft, memory).",
        lambda figures: by_label({name: pair[TESTED] for name, pair in figures.sources.items()}),
        "proposer",
    ),
    _speculation(
        "osd_speculation_accepted_tokens_total",
        "Tokens accepted, by who proposed them (draft, memory).",
        lambda figures: by_label({name: pair[ACCEPTED] for name, pair in figures.sources.items()}),
        "proposer",
    ),
    _speculation(
        "osd_speculation_position_tested_total",
        "Draft tokens at a position (0 = first) with all before them accepted.",
        _by_position(TESTED),
        "position",
    ),
    _speculation(
        "osd_speculation_position_accepted_total",
        "Draft tokens accepted at a position; over tested it is the conditional acceptance.",
        _by_position(ACCEPTED),
        "position",
    ),
    _speculation(
        "osd_speculation_context_tested_total",
        "Draft tokens tested, by the length of the context in tokens.",
        _by_context(TESTED),
        "context",
    ),
    _speculation(
        "osd_speculation_context_accepted_total",
        "Draft tokens accepted, by the length of the context in tokens.",
        _by_context(ACCEPTED),
        "context",
    ),
    _speculation(
        "osd_speculation_k",
        "Draft tokens that the present plan proposes.",
        lambda figures: known(figures.k),
    ),
    _speculation(
        "osd_speculation_predicted_tokens_per_second",
        "Estimated for the present plan: tokens expected of a step over its expected time.",
        lambda figures: known(figures.predicted_tokens_per_second),
    ),
    _speculation(
        "osd_speculation_net_ratio",
        "Measured speed with speculation over without: mean, and the ends of its 95 % interval.",
        _net_ratio,
        "bound",
    ),
)
"""What living replicas report of their speculation; shown once there is any."""
