"""The report: one Markdown page, and the same as JSON. Neither names hosts, users or places."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import (
    FAILED,
    NOT_MEASURED,
    NOT_RUN,
    PASSED,
    Figure,
    Outcome,
    show,
)
from benchmarks.gpu.registry import Check

SCHEMA_VERSION = 1
SHORTEST_NAME = 2
COMMON_NAMES = frozenset({"root", "user", "ubuntu", "admin", "localhost"})
"""They tell nothing, and stand in logs with another meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that a run has to say."""

    machine: Mapping[str, str]
    outcomes: Sequence[Outcome]
    checks: Mapping[str, Check]
    seconds: float
    models: str
    """which were used"""
    is_dry: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "is_dry_run": self.is_dry,
            "machine": dict(self.machine),
            "models": self.models,
            "seconds": round(self.seconds, 1),
            "checks": [asdict(outcome) for outcome in self.outcomes],
        }


def write(
    report: Report, directory: Path, hide: Sequence[str] = (), names: Sequence[str] | None = None
) -> Path:
    """`report.md` and `report.json` in the directory. `hide` and `names` as in `Cleaner`. Returns
    the page."""
    clean = Cleaner(hide, names)
    page = directory / "report.md"
    page.write_text(clean(markdown(report)))
    data = clean.values(report.as_dict())
    (directory / "report.json").write_text(json.dumps(data, indent=2) + "\n")
    return page


def markdown(report: Report) -> str:
    """The page, as found."""
    parts = [_head(report), _table(report)]
    began = [outcome for outcome in report.outcomes if outcome.seconds]
    parts += [_details(outcome, report.checks[outcome.check]) for outcome in began]
    return "\n\n".join(parts) + "\n"


def _head(report: Report) -> str:
    counts = [
        f"{sum(outcome.verdict == verdict for outcome in report.outcomes)} {verdict}"
        for verdict in (PASSED, FAILED, NOT_RUN, NOT_MEASURED)
        if any(outcome.verdict == verdict for outcome in report.outcomes)
    ]
    title = "OSD on a GPU" + (": dry run on the CPU" if report.is_dry else "")
    lines = [f"# {title}", "", f"{', '.join(counts)}; {report.seconds:.0f} s.", ""]
    if report.is_dry:
        lines += [
            "No GPU was used, and no figure of this page is one of a GPU. It shows that the checks "
            "run.",
            "",
        ]
    lines += ["| | |", "|---|---|"]
    rows = {**report.machine, "models": report.models}
    return "\n".join([*lines, *(f"| {key} | {_cell(value)} |" for key, value in rows.items())])


def _table(report: Report) -> str:
    lines = ["## Checks", "", "| check | verdict | figures | what it means |", "|---|---|---|---|"]
    for outcome in report.outcomes:
        check = report.checks[outcome.check]
        verdict = _cell(str(outcome).replace(outcome.verdict, f"**{outcome.verdict}**", 1))
        figures = "; ".join(f"{f.name}: {show(f)}" for f in _chosen(outcome.figures))
        meaning = f"{check.shows}. {check.means}"
        lines.append(f"| `{check.name}` | {verdict} | {_cell(figures)} | {_cell(meaning)} |")
    return "\n".join(lines)


def _chosen(figures: Sequence[Figure]) -> list[Figure]:
    """Those for the table; all of them stand below it."""
    return [figure for figure in figures if figure.is_key or figure.is_met is False]


def _details(outcome: Outcome, check: Check) -> str:
    lines = [f"## {check.name}", "", f"{check.shows}.", ""]
    lines += [f"{outcome}; {outcome.seconds:.0f} of at most {check.seconds:.0f} s."]
    if outcome.figures:
        lines += ["", "| figure | found | goal | |", "|---|---|---|---|"]
        lines += [_figure_row(figure) for figure in outcome.figures]
    if outcome.details:
        lines += ["", *(f"* {text}" for text in outcome.details)]
    if outcome.log_tail.strip():
        log = outcome.log_tail.replace("```", "'''")
        lines += ["", "<details><summary>The end of its log</summary>", "", "```", log, "```", ""]
        lines += ["</details>"]
    return "\n".join(lines)


def _figure_row(figure: Figure) -> str:
    verdict = {True: "met", False: "**missed**", None: ""}[figure.is_met]
    return f"| {_cell(figure.name)} | {_cell(show(figure))} | {_cell(figure.goal)} | {verdict} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


class Cleaner:
    """Takes out what says whose machine it was: paths, but for places within packages and this
    checkout; addresses; the names of host and user; what else is to be hidden."""

    _PATH = re.compile(r"(?<![\w/.:<])(?:~/|/)(?:[\w.+@%=~-]+/)+[\w.+@%=~-]*")
    _PACKAGES = re.compile(r"/\S*?/(?:site|dist)-packages/")
    _ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
    _UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,}")

    def __init__(self, hide: Sequence[str] = (), names: Sequence[str] | None = None) -> None:
        """`names`: of host and user; None = those of this machine."""
        self._root = str(Path(__file__).resolve().parents[2]) + "/"
        self._hide = sorted(filter(None, hide), key=len, reverse=True)
        self._names = sorted(
            (n for n in set(own_names() if names is None else names) if _tells(n)),
            key=len,
            reverse=True,
        )

    def __call__(self, text: str) -> str:
        for hidden in self._hide:
            text = text.replace(hidden, "<path>")
        text = self._PACKAGES.sub("", text)
        text = text.replace(self._root, "")
        text = self._PATH.sub("<path>", text)
        text = self._ADDRESS.sub("<address>", text)
        text = self._UUID.sub("<GPU>", text)
        for name in self._names:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
        return text

    def values(self, data: Any) -> Any:
        """The same for every text in plain JSON."""
        if isinstance(data, str):
            return self(data)
        if isinstance(data, Mapping):
            return {key: self.values(value) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.values(value) for value in data]
        return data


def own_names() -> list[str]:
    """Of this host and of who runs this."""
    host = socket.gethostname()
    return [host, host.partition(".")[0], _user(), Path.home().name]


def _tells(name: str) -> bool:
    return len(name) >= SHORTEST_NAME and name.lower() not in COMMON_NAMES


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return ""
