"""Unlimited, seeded requests in four domains, shaped after Spider, GSM8K, Python functions and
finance news.

A prompt has so many slots that it practically never repeats, and its answer follows from it. Models
are trained on some seeds; the demo and the tests serve others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from osd.tiny import text_arithmetic, text_finance, text_python, text_sql

DOMAINS = ("arithmetic", "sql", "python", "finance")
"""The classes of traffic; each has a generator."""

HOME = "arithmetic"
"""The one domain the tiny draft is trained on."""

_GENERATORS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "arithmetic": text_arithmetic.generate,
    "sql": text_sql.generate,
    "python": text_python.generate,
    "finance": text_finance.generate,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One user message and the answer the tiny target was taught to give.

    Example:
        Request(domain="sql", prompt="How many singers are older than 30?",
                answer="SELECT COUNT(*) FROM ...")
    """

    domain: str
    prompt: str
    answer: str


def stream(domain: str, seed: int) -> Iterator[Request]:
    """Endless requests of one domain. The same seed gives the same requests."""
    if domain not in _GENERATORS:
        raise ValueError(f"domain {domain!r}: must be one of {', '.join(DOMAINS)}")
    rng = Random(f"{domain}/{seed}")
    while True:
        prompt, answer = _GENERATORS[domain](rng)
        yield Request(domain=domain, prompt=prompt, answer=answer)


def requests(domain: str, n: int, seed: int, start: int = 0) -> list[Request]:
    """`n` requests of the stream of `seed`, beginning with number `start`."""
    return list(islice(stream(domain, seed), start, start + n))
