"""Seeded requests that ask for the continuation of a sentence in one of five languages.

A prompt is the next few words of a page, and no two prompts share eight words in a row, nor does a
prompt to be served with any page that was trained on, in any language. Block 0 comes from training
pages, for those who learn beforehand; the others, for traffic, from pages that are served.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.natural.text import SourceFile
from benchmarks.prose import corpus
from benchmarks.prose.corpus import DOMAINS, split
from osd.common.files import sha256
from osd.errors import ConfigError
from osd.tiny.cache import build_once
from osd.tiny.traffic import Request

MIN_CHARS, MAX_CHARS = 64, 100
"""Length of a prompt: about 20 to 35 tokens."""
GRAM = 8
"""Words in a row that no two texts may share."""
TEMPERATURE = 0.7
MAX_TOKENS = 96
BLOCK_SIZE = 576
"""Requests of a domain in a block. The smallest domain has three blocks of them to serve."""
TRAINING = 0
"""The block of training pages."""


def requests(domain: str, block: int, num: int, directory: Path | None = None) -> list[Request]:
    """The first `num` requests of a domain in a block; the answer is left to the target.

    `directory`: what `write` filled, the cache's by default. Raises `ConfigError` where the pages
    have fewer.
    """
    side, start = ("train", 0) if block == TRAINING else ("serve", (block - 1) * BLOCK_SIZE)
    chosen = some(domain, side, start, num, directory)
    return [Request(domain=domain, prompt=prompt, answer="") for prompt in chosen]


def some(domain: str, side: str, start: int, num: int, directory: Path | None = None) -> list[str]:
    """`num` prompts of a domain from the `start`-th on. `side`: train or serve."""
    found = _prompts(domain, directory)[side]
    if start + num > len(found):
        raise ConfigError(
            f"{domain}, to {side}: the pages have {len(found)} prompts, {start + num} were asked "
            "for; ask for fewer requests or an earlier block"
        )
    return found[start : start + num]


@cache
def _prompts(domain: str, directory: Path | None) -> dict[str, list[str]]:
    if domain not in DOMAINS:
        raise ValueError(f"domain {domain!r}: must be one of {', '.join(DOMAINS)}")
    return dict(json.loads(((directory or _cached()) / f"{domain}.json").read_text()))


def _cached() -> Path:
    pages = corpus.corpus()
    name = f"prose-prompts-{pages.name.rsplit('-', 1)[1]}-{sha256(Path(__file__))[:16]}"
    return build_once(name, lambda out: write(pages, out))


def write(pages: Path, out: Path) -> None:
    """Write `DOMAIN.json` for each domain: {"train": prompts, "serve": prompts}, shuffled."""
    words = Words()
    sides = {domain: split(domain, pages) for domain in DOMAINS}
    learnt = [file.text for one in sides.values() for file in one.train]
    is_known = words.grams(learnt)
    for domain, one in sides.items():
        found = {
            "train": fresh(_pieces(one.train), words, np.zeros(0, np.uint64)),
            "serve": fresh(_pieces(one.serve), words, is_known),
        }
        for side, prompts in found.items():
            Random(f"{domain}/{side}").shuffle(prompts)
        (out / f"{domain}.json").write_text(json.dumps(found, ensure_ascii=False))


def _pieces(files: Sequence[SourceFile]) -> list[str]:
    return [piece for file in files for piece in pieces(file.text)]


def pieces(text: str) -> Iterator[str]:
    """A text's paragraphs (lines) cut into whole words of `MIN_CHARS` to `MAX_CHARS`, without
    overlap. What is left at a paragraph's end is left out, as nothing would follow it."""
    for line in text.split("\n"):
        piece = ""
        for word in line.split():
            joined = f"{piece} {word}".strip()
            if len(joined) <= MAX_CHARS:
                piece = joined
                continue
            if len(piece) >= MIN_CHARS:
                yield piece
            piece = word if len(word) <= MAX_CHARS else ""


class Words:
    """Numbers for words, so that runs of `GRAM` of them are found fast."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def grams(self, texts: Iterable[str]) -> np.ndarray:
        """uint64, sorted, each once: the runs of `GRAM` words in any of the texts."""
        found = [self._grams(text) for text in texts]
        return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))

    def _grams(self, text: str) -> np.ndarray:
        numbers = self._numbers
        ids = np.array([numbers.setdefault(w, len(numbers)) for w in text.lower().split()])
        total = np.zeros(max(0, len(ids) - GRAM + 1), np.uint64)
        for place in range(GRAM if len(total) else 0):
            total = total * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
            total += ids[place : place + len(total)].astype(np.uint64)
            total ^= total >> np.uint64(29)
        return total


def fresh(prompts: Iterable[str], words: Words, known: np.ndarray) -> list[str]:
    """The prompts that share no run of `GRAM` words with `known` or with an earlier one."""
    seen: set[int] = set()
    found, texts = [], set()
    for prompt in prompts:
        grams = words.grams([prompt])
        own = set(grams.tolist())
        place = np.minimum(np.searchsorted(known, grams), max(len(known) - 1, 0))
        is_new = not len(known) or not (known[place] == grams).any()
        if is_new and not own & seen and prompt not in texts:
            seen |= own
            texts.add(prompt)
            found.append(prompt)
    return found
