"""`promtool` and `prometheus` as a distribution installs them, and the names in an expression."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from osd.observe.exposition import SERIES
from tests.support.programs import path_of

OURS: dict[str, tuple[str, ...]] = {
    name: series.labels for name, series in SERIES.items() if series.kind != "histogram"
}
OURS |= {
    series.name + suffix: (*series.labels, *more)
    for series in SERIES.values()
    if series.kind == "histogram"
    for suffix, more in (("_bucket", ("le",)), ("_sum", ()), ("_count", ()))
}
"""Series that the control port declares -> their labels."""

PROMETHEUS: dict[str, tuple[str, ...]] = {"up": (), "ALERTS": ("alertname", "alertstate")}
"""Series that Prometheus makes itself -> their labels."""

OF_A_TARGET = {"job", "instance"}
"""Labels that Prometheus gives to everything it scrapes."""

_NAME = r"(?<![\w:$])([A-Za-z_:][\w:]*)"
_WORDS = {"and", "or", "unless", "offset", "bool", "sum", "count", "min", "max", "avg"}


class Named(NamedTuple):
    """What an expression names."""

    series: set[str]
    labels: set[str]
    """In matchers and in grouping clauses."""


def program(name: str) -> str:
    """Path of `promtool` or `prometheus`."""
    return path_of(name, package="prometheus")


def run(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """`promtool ARGUMENTS`, with `text` on its standard input."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=240, check=False
    )


def named(expression: str) -> Named:
    """Series and labels in an expression.

    Example:
        named('sum by (job) (rate(osd_swap_total{ok="true"}[5m]))')
        -> Named({"osd_swap_total"}, {"ok", "job"})
    """
    text = re.sub(r'"[^"]*"', '""', expression)
    matchers = re.findall(r"\{([^}]*)\}", text)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    clause = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
    groups = re.findall(clause, text)
    names = re.findall(_NAME + r"(?!\s*\()(?![\w:])", re.sub(clause, " ", text))
    return Named(set(names) - _WORDS, set(re.findall(_NAME, " ".join([*matchers, *groups]))))
