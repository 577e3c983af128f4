"""Seeded requests that ask for the continuation of a piece of the standard library's source.

A prompt is a few whole lines of a file that no model was trained on. The prompts of one seed are
all different. Other seeds give the same prompts in another order, so disjoint sets of requests must
come from different places of one seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

from benchmarks.natural.text import PACKAGES, SourceFile, split
from osd.tiny.traffic import Request

MIN_CHARS, MAX_CHARS = 150, 280
"""Length of a prompt: about 48 to 96 tokens."""

TEMPERATURE = 0.7
"""What this traffic is to be sampled at: greedy answers of so small a model run in circles."""

MAX_TOKENS = 96
"""The longest answer. A continuation seldom ends by itself."""


def requests(package: str, n: int, seed: int, start: int = 0) -> list[Request]:
    """`n` requests of the order of `seed`, from its `start`-th on; the answer is left to the
    target.

    Raises `ValueError` where the class is unknown or has fewer prompts.
    """
    prompts = _order(package, seed)
    if start + n > len(prompts):
        raise ValueError(
            f"{package} has {len(prompts)} prompts, {start + n} were asked for; ask for fewer"
        )
    return [
        Request(domain=package, prompt=prompt, answer="") for prompt in prompts[start : start + n]
    ]


@cache
def _order(package: str, seed: int) -> list[str]:
    return shuffled(_served(package), Random(f"{package}/{seed}"))


@cache
def _served(package: str) -> list[list[str]]:
    return served_windows(split(package).serve, _learnt())


@cache
def _learnt() -> list[SourceFile]:
    """The training files of all classes: the target has read them all."""
    return [file for package in PACKAGES for file in split(package).train]


def served_windows(serve: Sequence[SourceFile], learnt: Sequence[SourceFile]) -> list[list[str]]:
    """The windows of the files to serve, by the line they begin with, none twice.

    Those that stand in a training file too are left out, as licences do and what one package copied
    from another.
    """
    learnt_text = "\0".join("\n".join(_lines(file.text)) for file in learnt)
    learnt_lines = {line for file in learnt for line in _lines(file.text)}

    def is_learnt(window: str) -> bool:
        # Lines between the first and the last are whole in any text that has the window: a quick
        # way to say no.
        return learnt_lines.issuperset(window.split("\n")[1:-1]) and window in learnt_text

    seen: set[str] = set()
    places = []
    for file in serve:
        for windows in line_windows(file.text):
            fresh = [window for window in windows if window not in seen and not is_learnt(window)]
            seen.update(fresh)
            if fresh:
                places.append(fresh)
    return places


def line_windows(text: str) -> Iterator[list[str]]:
    """For each line that is not blank: all windows that begin there, whole lines of `MIN_CHARS` to
    `MAX_CHARS`.

    A window ends with the last character of its last line: the line break belongs to the
    continuation, as the tokenizer joins it with the indentation that follows.
    """
    lines = _lines(text)
    for first, line in enumerate(lines):
        if not line.strip():
            continue
        windows, window = [], line
        for following in lines[first + 1 :]:
            if len(window) > MAX_CHARS:
                break
            if len(window) >= MIN_CHARS and not window.endswith("\n"):
                windows.append(window)
            window = f"{window}\n{following}"
        if windows:
            yield windows


def _lines(text: str) -> list[str]:
    """The lines of a text, without blanks at their ends."""
    return [line.rstrip() for line in text.split("\n")]


def shuffled(places: Sequence[Sequence[str]], rng: Random) -> list[str]:
    """All windows in random order: first one of each place, then another of each that has more."""
    left = [rng.sample(windows, len(windows)) for windows in places]
    order = []
    while left:
        rng.shuffle(left)
        order += [windows.pop() for windows in left]
        left = [windows for windows in left if windows]
    return order


def training_prompts(files: Sequence[SourceFile], n: int, rng: Random) -> list[str]:
    """`n` windows of training files, for the target to answer while a draft is distilled from
    it."""
    return shuffled([windows for file in files for windows in line_windows(file.text)], rng)[:n]
