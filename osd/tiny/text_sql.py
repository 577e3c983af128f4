"""Questions about small databases in the manner of Spider, answered with one SQL query."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from osd.tiny.text_words import CITIES


@dataclass(frozen=True, slots=True)
class Schema:
    """Two tables, joined by `key`. `place` is a column of `parent`."""

    table: str
    plural: str
    label: str
    numbers: tuple[str, ...]
    category: str
    parent: str
    place: str
    key: str


SCHEMAS = (
    Schema(
        "singer",
        "singers",
        "name",
        ("age", "height", "sales"),
        "genre",
        "concert",
        "city",
        "concert_id",
    ),
    Schema(
        "student",
        "students",
        "name",
        ("age", "score", "credits"),
        "major",
        "school",
        "city",
        "school_id",
    ),
    Schema(
        "employee",
        "employees",
        "name",
        ("age", "salary", "bonus"),
        "title",
        "company",
        "city",
        "company_id",
    ),
    Schema(
        "flight",
        "flights",
        "number",
        ("price", "distance", "seats"),
        "status",
        "airport",
        "city",
        "airport_id",
    ),
    Schema(
        "product",
        "products",
        "title",
        ("price", "weight", "stock"),
        "brand",
        "store",
        "town",
        "store_id",
    ),
    Schema(
        "player",
        "players",
        "name",
        ("age", "goals", "height"),
        "position",
        "team",
        "city",
        "team_id",
    ),
    Schema(
        "patient",
        "patients",
        "name",
        ("age", "weight", "visits"),
        "disease",
        "hospital",
        "town",
        "hospital_id",
    ),
    Schema(
        "book",
        "books",
        "title",
        ("pages", "price", "sales"),
        "language",
        "library",
        "town",
        "library_id",
    ),
    Schema(
        "painting",
        "paintings",
        "title",
        ("price", "height", "year"),
        "style",
        "museum",
        "city",
        "museum_id",
    ),
    Schema(
        "car", "cars", "model", ("price", "weight", "power"), "color", "dealer", "town", "dealer_id"
    ),
)
AGGREGATES = (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM"))
COMPARISONS = (("above", ">"), ("below", "<"), ("of at least", ">="), ("of at most", "<="))


def generate(rng: Random) -> tuple[str, str]:
    """A question and the query that answers it."""
    return rng.choice((_list, _count, _aggregate, _groups, _top))(rng, rng.choice(SCHEMAS))


def _join(schema: Schema) -> str:
    return (
        f"FROM {schema.table} AS T1 JOIN {schema.parent} AS T2 ON T1.{schema.key} = T2.{schema.key}"
    )


def _list(rng: Random, s: Schema) -> tuple[str, str]:
    (first, second), city, n = rng.sample(s.numbers, 2), rng.choice(CITIES), rng.randint(10, 99)
    words, sign = rng.choice(COMPARISONS)
    down = rng.random() < 0.5
    prompt = rng.choice(
        (
            f"List the {s.label} of all {s.plural} with {first} {words} {n} whose {s.parent} is in "
            f"{city}, "
            f"{'highest' if down else 'lowest'} {second} first.",
            f"Which {s.plural} of a {s.parent} in {city} have {first} {words} {n}? Show the "
            f"{s.label}, sorted "
            f"by {'falling' if down else 'rising'} {second}.",
        )
    )
    return prompt, (
        f"SELECT T1.{s.label} {_join(s)} WHERE T2.{s.place} = '{city}' AND T1.{first} {sign} {n} "
        f"ORDER BY T1.{second} {'DESC' if down else 'ASC'};"
    )


def _count(rng: Random, s: Schema) -> tuple[str, str]:
    (first, second), city = rng.sample(s.numbers, 2), rng.choice(CITIES)
    (words, sign), n = rng.choice(COMPARISONS), rng.randint(10, 99)
    (words2, sign2), m = rng.choice(COMPARISONS), rng.randint(10, 99)
    prompt = rng.choice(
        (
            f"How many {s.plural} with {first} {words} {n} and {second} {words2} {m} belong to a "
            f"{s.parent} in {city}?",
            f"Count the {s.plural} of every {s.parent} in {city} that have {first} {words} {n} and "
            f"{second} "
            f"{words2} {m}.",
        )
    )
    return prompt, (
        f"SELECT COUNT(*) {_join(s)} WHERE T2.{s.place} = '{city}' AND T1.{first} {sign} {n} "
        f"AND T1.{second} {sign2} {m};"
    )


def _aggregate(rng: Random, s: Schema) -> tuple[str, str]:
    (first, second), city = rng.sample(s.numbers, 2), rng.choice(CITIES)
    (words, sign), n = rng.choice(COMPARISONS), rng.randint(10, 99)
    name, function = rng.choice(AGGREGATES)
    prompt = rng.choice(
        (
            f"What is the {name} {first} of the {s.plural} in {city} whose {second} is {words} "
            f"{n}, "
            f"for each {s.category}?",
            f"For each {s.category}, find the {name} {first} of {s.plural} with {second} {words} "
            f"{n} in {city}.",
        )
    )
    return prompt, (
        f"SELECT T1.{s.category}, {function}(T1.{first}) {_join(s)} WHERE T2.{s.place} = '{city}' "
        f"AND T1.{second} {sign} {n} GROUP BY T1.{s.category};"
    )


def _groups(rng: Random, s: Schema) -> tuple[str, str]:
    first, city, n, m = (
        rng.choice(s.numbers),
        rng.choice(CITIES),
        rng.randint(10, 99),
        rng.randint(2, 29),
    )
    words, sign = rng.choice(COMPARISONS)
    prompt = rng.choice(
        (
            f"Which {s.category} has more than {m} {s.plural} with {first} {words} {n}, leaving "
            f"out {city}?",
            f"Outside {city}, find each {s.category} that more than {m} {s.plural} with {first} "
            f"{words} {n} share.",
        )
    )
    return prompt, (
        f"SELECT T1.{s.category}, COUNT(*) {_join(s)} WHERE T2.{s.place} <> '{city}' AND "
        f"T1.{first} {sign} {n} "
        f"GROUP BY T1.{s.category} HAVING COUNT(*) > {m};"
    )


def _top(rng: Random, s: Schema) -> tuple[str, str]:
    (first, second), city = rng.sample(s.numbers, 2), rng.choice(CITIES)
    (words, sign), n, limit = rng.choice(COMPARISONS), rng.randint(10, 99), rng.randint(2, 30)
    prompt = rng.choice(
        (
            f"Show {s.label} and {first} of the {limit} {s.plural} from {city} with the most "
            f"{first} among those "
            f"with {second} {words} {n}.",
            f"In {city}, what are the top {limit} {s.plural} by {first} if the {second} is {words} "
            f"{n}?",
        )
    )
    return prompt, (
        f"SELECT T1.{s.label}, T1.{first} {_join(s)} WHERE T2.{s.place} = '{city}' AND T1.{second} "
        f"{sign} {n} "
        f"ORDER BY T1.{first} DESC LIMIT {limit};"
    )
