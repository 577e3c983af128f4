"""The head of an answer comes with its first word."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.begun import DEAD, HeadWithFirstWord

START = {"type": "http.response.start", "status": 200, "headers": []}


def body(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def sent(
    *messages: dict[str, Any], kind: str = "http", dies_at: int = 99
) -> list[tuple[int, dict[str, Any]]]:
    """What comes of an application's messages: the index of the one that brought it, and it. The
    engine is dead from one of them on."""
    found: list[tuple[int, dict[str, Any]]] = []
    now = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal now
        for now, message in enumerate(messages):  # noqa: B007
            await send(message)

    async def keep(message: dict[str, Any]) -> None:
        found.append((now, message))

    asyncio.run(HeadWithFirstWord(app, lambda: now >= dies_at)({"type": kind}, None, keep))
    return found


@pytest.mark.parametrize("empty", [0, 1, 3])
def test_the_head_waits_for_the_first_word(empty: int) -> None:
    last = body(b"", more=False)
    messages = [START, *[body(b"")] * empty, body(b"a"), body(b"b"), last]
    first = 1 + empty
    assert sent(*messages) == [
        (first, START),
        (first, body(b"a")),
        (first + 1, body(b"b")),
        (first + 2, last),
    ]


def test_an_answer_without_words_has_a_head() -> None:
    last = body(b"", more=False)
    assert sent(START, last) == [(1, START), (1, last)]
    bare = {"type": "http.response.body"}
    assert sent(START, bare) == [(1, START), (1, bare)]


def test_after_the_first_word_nothing_is_held_back() -> None:
    messages = [START, body(b"a"), body(b""), body(b"b", more=False)]
    assert [message for _, message in sent(*messages)] == [
        START, body(b"a"), body(b"b", more=False)
    ]  # fmt: skip


def test_what_is_no_answer_passes() -> None:
    accept = {"type": "websocket.accept"}
    assert sent(accept, kind="websocket") == [(0, accept)]


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_a_dead_engine_begins_no_answer(dies_at: int) -> None:
    """vLLM's error, as the first event of a stream or as a whole answer, is not passed on."""
    error, last = body(b'data: {"error": {}}'), body(b"", more=False)
    (at, head), (_, answer) = sent(START, body(b""), error, last, dies_at=dies_at)
    assert (at, head["status"], answer) == (2, 503, {"type": last["type"], "body": DEAD})
    assert dict(head["headers"])[b"content-length"] == str(len(DEAD)).encode()


def test_what_was_begun_ends_with_what_vllm_says() -> None:
    messages = [START, body(b"a"), body(b"error"), body(b"", more=False)]
    assert [message for _, message in sent(*messages, dies_at=2)] == messages
