"""Prose in five languages and two genres, page by page: what models are trained on, and what is
served.

    packages ─► pages ─► paragraphs in their language ─► by the page's name: training or serving

A page's name is the same in all languages, so that a text and its translations lie on one side. A
domain is a language (its books) or a language with `-man` (its manual pages).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.natural.text import SourceFile, Split
from benchmarks.prose import html, manual, packages
from benchmarks.prose.packages import GUIDE, HANDBOOK, LANGUAGES, MANUAL
from osd.tiny.cache import build_once

MANUAL_SUFFIX = "-man"
DOMAINS = (*LANGUAGES, *(f"{language}{MANUAL_SUFFIX}" for language in LANGUAGES))
HOME = "en"
"""What drafts are distilled on."""
SERVED_OF_20 = 8
"""Pages in twenty that are served."""
MIN_PARAGRAPH, MIN_PAGE = 40, 200
"""Characters: what is shorter is left out."""

COMMON_WORDS: Mapping[str, str] = {
    "en": "the of and to is are this that with which for you be not from can",
    "de": "der die das und ist nicht ein eine den zu mit wird werden sie dem von",
    "fr": "le la les des est une que pour dans pas du sur vous qui et par",
    "es": "el la los las es una que para en no del se con por este como",
}
"""A paragraph is taken for the language that has most of its words here."""
SOURCES = tuple(Path(__file__).parent / f"{name}.py" for name in ("corpus", "html", "manual"))
"""Files whose text changes the pages."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a book or a manual page.

    Example:
        Page(domain="de", name="handbook/sect.backup.html", paragraphs=("Datensicherung ist ...",))
    """

    domain: str
    name: str
    paragraphs: tuple[str, ...]

    @property
    def is_served(self) -> bool:
        return is_served(self.name)


def is_served(name: str) -> bool:
    """On which side the page of that name lies, in every language."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 20 < SERVED_OF_20


def pages(root: Path, language: str) -> Iterator[Page]:
    """All pages in a language with enough text, by source and name. No paragraph comes twice."""
    seen: set[str] = set()
    for source, pattern in packages.places(language).items():
        domain = f"{language}{MANUAL_SUFFIX}" if source == MANUAL else language
        for path in sorted(root.glob(pattern)):
            fresh = []
            for paragraph in _paragraphs(source, path):
                if paragraph not in seen and is_prose(paragraph, language):
                    seen.add(paragraph)
                    fresh.append(paragraph)
            if sum(map(len, fresh)) >= MIN_PAGE:
                yield Page(domain, f"{source}/{path.name.removesuffix('.gz')}", tuple(fresh))


def _paragraphs(source: str, path: Path) -> list[str]:
    if source in (HANDBOOK, GUIDE):
        return html.paragraphs_of_html(path.read_text("utf-8", "replace"))
    return manual.paragraphs_of_manual(
        gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    )


def is_prose(paragraph: str, language: str) -> bool:
    """Whether it is long enough and in that language; translations leave paragraphs in English."""
    if len(paragraph) < MIN_PARAGRAPH:
        return False
    letters = [c for c in paragraph.lower() if c.isalpha()]
    num_cyrillic = sum("а" <= c <= "я" or c == "ё" for c in letters)
    if language == "ru" or 2 * num_cyrillic > len(letters):
        return language == "ru" and 2 * num_cyrillic > len(letters)
    words = re.findall(r"[^\W\d_]+", paragraph.lower())
    counts = {
        one: sum(word in common.split() for word in words) for one, common in COMMON_WORDS.items()
    }
    return counts[language] > 0 and counts[language] == max(counts.values())


def corpus_hash(root: Path) -> str:
    """16 hex digits that change with the packages' versions and with the code that reads them."""
    digest = hashlib.sha256(f"{packages.cache_name()}\n{packages.versions(root)}".encode())
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def corpus() -> Path:
    """Directory with a file for each domain, made where it is missing."""
    root = packages.fetched()
    return build_once(f"prose-corpus-{corpus_hash(root)}", lambda out: write(root, out))


def write(root: Path, out: Path) -> None:
    """Write `DOMAIN.json` for each domain: {"train": [[name, text], ...], "serve": ...}."""
    for language in LANGUAGES:
        found = list(pages(root, language))
        for domain in (language, f"{language}{MANUAL_SUFFIX}"):
            sides: dict[str, list[Sequence[str]]] = {"train": [], "serve": []}
            for page in found:
                if page.domain == domain:
                    side = "serve" if page.is_served else "train"
                    sides[side].append((page.name, "\n".join(page.paragraphs) + "\n"))
            (out / f"{domain}.json").write_text(json.dumps(sides, ensure_ascii=False))


@cache
def split(domain: str, directory: Path | None = None) -> Split:
    """The pages of a domain, apart, a paragraph a line. `directory`: what `write` filled, the
    cache's by default. Raises `ValueError` for an unknown domain."""
    if domain not in DOMAINS:
        raise ValueError(f"domain {domain!r}: must be one of {', '.join(DOMAINS)}")
    sides = json.loads(((directory or corpus()) / f"{domain}.json").read_text())
    files = {side: tuple(SourceFile(*page) for page in found) for side, found in sides.items()}
    return Split(**files)
