"""A service whose target and draft are split over two processes learns as any other."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from transformers import AutoModelForCausalLM

from osd.client.http import Client
from osd.client.load import Answer
from osd.service.note import Running
from tests.support import acceptance, services
from tests.support.beside import Beside, assert_gone
from tests.support.greedy import greedy_answers
from tests.support.pairs import Pair
from tests.support.processes import named
from tests.support.services import status, wait_until
from tests.support.traffic import PROMPTS, ask, ids_of

pytestmark = [pytest.mark.slow, pytest.mark.variants, pytest.mark.timeout(600)]

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def split(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """Its first draft knows nothing of its target."""
    directory = tmp_path_factory.mktemp("split")
    arguments = services.settings("test-split", directory / "data", pair.target, pair.stranger)
    arguments.append("serving.vllm.tensor_parallel_size=2")
    split = Beside(arguments, directory)
    yield split
    if split.served is not None:
        split.served.end()


def test_a_draft_on_two_ranks_learns_and_is_swapped_on_both(split: Beside, pair: Pair) -> None:
    split.note = note = split.start().wait_ready()
    assert len(named(split.look(), "VLLM::Worker")) == 2
    first = ask(note.service_url, PROMPTS, max_tokens=MAX_TOKENS)
    answers, newest = list(first), first
    deadline = time.monotonic() + 120
    while acceptance.alpha(acceptance.counts(newest)) < 0.6 and time.monotonic() < deadline:
        newest = ask(note.service_url, PROMPTS * 2, streams=6, max_tokens=MAX_TOKENS)
        answers += newest
    before, now = (acceptance.alpha(acceptance.counts(some)) for some in (first, newest))
    print(f"live α on two ranks: {before:.3f}, then {now:.3f} after {len(answers)} requests")
    assert now > before + 0.3
    assert [answer for answer in answers if not answer.ok] == []
    assert_are_the_targets(answers, pair)
    assert_both_ranks_swapped(note)


def assert_are_the_targets(answers: list[Answer], pair: Pair) -> None:
    """Token by token, those of a forward pass of the whole target."""
    target = AutoModelForCausalLM.from_pretrained(pair.target).eval()
    wanted = greedy_answers(target, [ids_of(prompt) for prompt in PROMPTS])
    for i, answer in enumerate(answers):
        assert list(answer.token_ids) == wanted[i % len(PROMPTS)].answer_ids[:MAX_TOKENS]


def assert_both_ranks_swapped(note: Running) -> None:
    wait_until(lambda: status(note.control_url)["replicas"][0]["version"] > 1, 30, "it is reported")
    found = status(note.control_url)
    (replica,) = found["replicas"]
    assert (replica["off"], replica["unproved"]) == ({}, "")
    swaps = [e for e in Client(note.control_url).get("/osd/events") if e["kind"] == "swapped"]
    assert swaps
    assert all("weights read back and equal" in swap["text"] for swap in swaps)


def test_no_rank_outlives_the_service(split: Beside) -> None:
    split.look()
    assert split.served is not None
    split.served.interrupt()
    print(f"Ctrl-C: both ranks gone after {assert_gone(split, 10):.1f} s")
    assert split.served.process.wait(1) == 0
    assert "Traceback" not in split.served.log.read_text()
