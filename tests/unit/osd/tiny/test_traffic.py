"""The generated traffic is seeded and endless, and hardly ever repeats a prompt."""

from __future__ import annotations

import ast
import re
from itertools import islice

import pytest

from osd.tiny.text_words import CITIES
from osd.tiny.traffic import DOMAINS, HOME, requests, stream

NUM = 5000


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_do_not_repeat(domain: str) -> None:
    prompts = {request.prompt for request in requests(domain, NUM, seed=1)}
    assert len(prompts) > 0.999 * NUM


@pytest.mark.parametrize("domain", DOMAINS)
def test_seeds_share_next_to_no_prompt(domain: str) -> None:
    first = {request.prompt for request in requests(domain, NUM, seed=0)}
    second = {request.prompt for request in requests(domain, NUM, seed=1)}
    assert len(first & second) < 0.001 * NUM


@pytest.mark.parametrize("domain", DOMAINS)
def test_same_seed_same_requests(domain: str) -> None:
    assert requests(domain, 20, seed=3) == requests(domain, 20, seed=3)
    assert requests(domain, 5, seed=3, start=15) == requests(domain, 20, seed=3)[15:]
    assert list(islice(stream(domain, 3), 20)) == requests(domain, 20, seed=3)
    assert requests(domain, 20, seed=3) != requests(domain, 20, seed=4)


@pytest.mark.parametrize("domain", DOMAINS)
def test_answers_are_varied_and_of_a_healthy_length(domain: str) -> None:
    answers = [request.answer for request in requests(domain, 1000, seed=5)]
    assert len(set(answers)) > 990
    assert all(60 < len(answer) < 300 for answer in answers)


def test_unknown_domain_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'poems'.*arithmetic"):
        requests("poems", 1, seed=0)


def test_home_is_a_domain() -> None:
    assert HOME in DOMAINS


def test_arithmetic_is_right() -> None:
    for request in requests("arithmetic", 500, seed=6):
        for left, sign, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", request.answer):
            expected = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
            }
            assert int(result) == expected[sign], request
        assert request.answer.endswith(f"The answer is {result}.")


def test_python_compiles_and_defines_the_function_asked_for() -> None:
    for request in requests("python", 500, seed=6):
        (function,) = ast.parse(request.answer).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name in request.prompt
        assert ast.get_docstring(function)


def test_sql_runs_on_sqlite_and_gives_what_was_asked_for() -> None:
    import sqlite3

    from osd.tiny.text_sql import SCHEMAS

    database = sqlite3.connect(":memory:")
    for schema in SCHEMAS:
        columns = ", ".join((schema.label, schema.category, schema.key, *schema.numbers))
        database.execute(f"CREATE TABLE {schema.table} ({columns})")
        database.execute(f"CREATE TABLE {schema.parent} ({schema.key}, {schema.place})")
        for key, city in enumerate(CITIES):
            database.execute(f"INSERT INTO {schema.parent} VALUES (?, ?)", (key, city))
            for number in range(5, 400, 7):
                row = (
                    f"{schema.label} {number}",
                    f"category {number % 3}",
                    key,
                    *(number for _ in schema.numbers),
                )
                database.execute(
                    f"INSERT INTO {schema.table} VALUES ({', '.join('?' * len(row))})", row
                )
    num_rows = [
        len(database.execute(request.answer).fetchall()) for request in requests("sql", 500, seed=6)
    ]
    assert min(num_rows) > 0, "every question has an answer in a database that holds all cities"
    assert len(set(num_rows)) > 5, "and not always the same"


def test_finance_summaries_take_their_figures_from_the_news() -> None:
    for request in requests("finance", 500, seed=6):
        figures = re.findall(r"\d+(?:\.\d+)?", request.answer)
        assert figures
        assert set(figures) <= set(re.findall(r"\d+(?:\.\d+)?", request.prompt)), request
