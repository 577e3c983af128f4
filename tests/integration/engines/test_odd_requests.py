"""Requests that are not drafted for, over all ways of running vLLM: their answers are those of the
same runner without speculation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving.vllm import undrafted
from tests.integration.conftest import release_of
from tests.integration.serving.test_odd_requests import (
    BESIDE,
    DRAFTED,
    TOGETHER,
    UNDRAFTED,
    Bare,
    assert_min_tokens_ends_where_it_should,
    assert_same,
    engine_of,
)
from tests.support.engines import Engine
from tests.support.pairs import Pair
from tests.support.ways import Way

ALONE = ["bias, hot, top-p and top-k", "min-p, all logprobs", "chosen, as many logprobs"]


@pytest.fixture(scope="module")
def bare(pair: Pair, way: Way, speculating: Engine) -> Bare:
    """Short answers: interpreted kernels take a tenth of a second a request and step."""
    return Bare(engine_of(pair, None, way=way), num_tokens=12)


@pytest.fixture(scope="module")
def odd_engine(pair: Pair, way: Way, bare: Bare) -> Engine:
    undrafted.refuse_undrafted()
    return engine_of(pair, release_of(pair.draft, 1), way=way, control={"mode": "fixed"})


@pytest.fixture
def odd(odd_engine: Engine) -> Iterator[Engine]:
    yield odd_engine
    assert odd_engine.command("report")["problem"] == ""


def test_what_vllm_refuses_beside_a_draft_is_answered_beside_drafted_requests(
    odd: Engine, bare: Bare, crowd: list[list[int]]
) -> None:
    asked = [(name, i % 5) for i, name in enumerate(UNDRAFTED) if name in TOGETHER]
    found = assert_same(odd, bare, crowd, [*BESIDE, *asked])
    assert all(answer.num_draft_tokens > 0 for answer in found[: len(BESIDE)])


@pytest.mark.parametrize("name", ALONE)
def test_what_vllm_refuses_beside_a_draft_is_answered_alone(
    odd: Engine, bare: Bare, crowd: list[list[int]], name: str
) -> None:
    asked = [*UNDRAFTED].index(name) % 5
    assert_same(odd, bare, crowd, [(name, asked)])


def test_what_else_changes_how_a_token_is_chosen_is_kept_to(
    odd: Engine, bare: Bare, crowd: list[list[int]]
) -> None:
    found = assert_same(odd, bare, crowd, [(name, i % 5) for i, name in enumerate(DRAFTED)])
    assert sum(answer.num_draft_tokens > 0 for answer in found) > len(found) / 2


def test_min_tokens_end_where_they_should(odd: Engine, bare: Bare, crowd: list[list[int]]) -> None:
    assert_min_tokens_ends_where_it_should(odd, bare, crowd[:4])
