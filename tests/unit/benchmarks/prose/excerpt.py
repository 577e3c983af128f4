"""A small tree as Debian's packages have it, with pages in five languages that are translations of
each other."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

from benchmarks.prose.corpus import COMMON_WORDS
from benchmarks.prose.packages import GUIDE, HANDBOOK, LANGUAGES, MANUAL, VERSIONS, places

RUSSIAN = "система пакет установка файл который можно нужно если команда пользователь"
PAGES = 12
"""Of each source."""


def sentence(language: str, rng: Random) -> str:
    """Some 200 characters that no other call gives."""
    common = COMMON_WORDS.get(language, RUSSIAN).split()
    words = []
    for _ in range(18):
        words += [rng.choice(common), f"{_letters(language, rng)}"]
    return " ".join(words).capitalize() + "."


def _letters(language: str, rng: Random) -> str:
    return "".join(rng.choices("абвгдежз" if language == "ru" else "abcdefgh", k=6))


def write_tree(root: Path, num_paragraphs: int = 4) -> None:
    """Pages of all sources in all languages."""
    for language in LANGUAGES:
        rng = Random(language)
        for source, pattern in places(language).items():
            for number in range(PAGES):
                said = [sentence(language, rng) for _ in range(num_paragraphs)]
                path = root / pattern.replace("[1-8]", "7").replace("*", f"page-{number}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_PAGES[source](said))
    (root / VERSIONS).write_text("pages_1.0\n")


def handbook(paragraphs: list[str]) -> bytes:
    return "".join(f'<div class="para">{one}</div>' for one in paragraphs).encode()


def guide(paragraphs: list[str]) -> bytes:
    return "".join(f"<p>{one}</p>" for one in paragraphs).encode()


def manual(paragraphs: list[str]) -> bytes:
    return gzip.compress("".join(f".PP\n{one}\n" for one in paragraphs).encode())


_PAGES = {HANDBOOK: handbook, GUIDE: guide, MANUAL: manual}
