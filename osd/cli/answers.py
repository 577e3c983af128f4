"""What a running service has done, in a sentence for each command that changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from osd.cli.options import show
from osd.common.wording import counted

Answer = Mapping[str, Any]
"""Of the control port: `{"ok": true, "action": ..., ...}`."""


def tell(answer: Answer, as_json: bool) -> None:
    """Print an answer of the control port: a sentence, or all of it. A service of another version
    may answer otherwise: then all of it, too."""
    try:
        sentence = "" if as_json else SENTENCES[answer["action"]](answer)
    except KeyError:
        sentence = ""
    typer.echo(sentence) if sentence else show(answer)


def _steps(answer: Answer) -> str:
    names = ", ".join(answer["steps"])
    return f"Attached engines do {names}, and no other step." if names else "Attached engines rest."


def _purge(answer: Answer) -> str:
    versions = ", ".join(f"v{version}" for version in answer["trained_on"])
    return f"{counted(answer['purged'], 'trace')} deleted" + (
        f"; drafts that may have learnt from them: {versions}." if versions else "."
    )


SENTENCES: dict[str, Callable[[Answer], str]] = {
    "pause": lambda a: "No training and no publishing until `osd resume`; serving goes on.",
    "resume": lambda a: "Training and publishing go on.",
    "promote": lambda a: (
        f"The engines are told to serve draft v{a['version']}, and training goes on from it."
    ),
    "rollback": lambda a: (
        f"The engines are told to serve draft v{a['version']}, the one before, "
        "and training goes on from it."
    ),
    "pin": lambda a: (
        f"The engines are told to serve draft v{a['version']} until `osd drafts unpin`."
    ),
    "unpin": lambda a: "No draft is pinned: what is trained from now on may serve.",
    "keep": lambda a: f"Draft v{a['version']} is never pruned.",
    "steps": _steps,
    "purge": _purge,
}
"""Action -> its sentence."""
