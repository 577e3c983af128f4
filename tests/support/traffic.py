"""Prompts for a random pair, and chat requests to the service that serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from osd.client.load import Answer, drive
from tests.support.pairs import VOCABULARY

MODEL = "pair"
"""The name that the target is served under."""


def prompt_texts(num: int, seed: int, length: int = 10) -> list[str]:
    """Random prompts such as "t25 t91".

    No word begins with a special token, as "t13" does with "t1": the tokenizer would split it.
    """
    random = np.random.default_rng(seed)
    return [" ".join(f"t{i}" for i in random.integers(20, VOCABULARY, length)) for _ in range(num)]


PROMPTS = prompt_texts(12, seed=1)
"""Few prompts, so that a draft learns them within seconds."""


def ids_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def ask(
    url: str, prompts: Sequence[str], *, streams: int = 4, max_tokens: int = 40, **more: Any
) -> list[Answer]:
    """Answers to chat requests, `streams` at a time. They run in a thread, as tests with a browser
    leave an event loop running in the main one."""
    job = drive(url, MODEL, prompts, streams=streams, max_tokens=max_tokens, **more)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, job).result()


class Traffic(threading.Thread):
    """Sends the same prompts again and again until stopped. `answers` holds the answers of one
    round after another."""

    def __init__(self, url: str, prompts: Sequence[str], **options: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._prompts, self._options = url, list(prompts), options
        self._stop_event = threading.Event()
        self.answers: list[Answer] = []

    def run(self) -> None:
        while not self._stop_event.is_set():
            self.answers += ask(self._url, self._prompts, **self._options)

    def __enter__(self) -> Traffic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self.join(120)

    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.ok]
