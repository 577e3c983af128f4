"""Words shared by the generators of traffic."""

from __future__ import annotations

from random import Random


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


NAMES = words(
    "Alice Omar Priya Lucas Mei Hannah Carlos Ingrid Kofi Nadia Tom Yuki Elena Samuel Fatima "
    "George Lena Ravi Chloe "
    "Diego Amina Peter Sofia Jack Rosa Victor Grace Hugo Leila Martin Zoe Ivan Clara Daniel Emma "
    "Felix Nora Oscar"
)

CITIES = words(
    "Paris London Berlin Madrid Oslo Tokyo Delhi Cairo Lima Boston Chicago Dublin Vienna Prague "
    "Rome Lisbon Seoul "
    "Sydney Toronto Zurich Athens Geneva Milan Dallas Denver Warsaw Lagos Nairobi Bogota Hanoi"
)


def two(rng: Random, words: list[str]) -> tuple[str, str]:
    """Two different words."""
    first, second = rng.sample(words, 2)
    return first, second
