"""The users of `osd bench soak`: they retry no request, and expect unchanged answers to known
prompts."""

from __future__ import annotations

import asyncio
import random
import threading
import time

from benchmarks.record import Row
from osd.errors import OSDError

NAME = "tiny"
"""The model's, as requests name it."""
STREAMS = 4
NUM_KNOWN = 16
"""Prompts whose answers are compared."""
KNOWN_ONE_IN = 4
SECONDS_PER_DOMAIN = 150.0


class Load(threading.Thread):
    """Streams of requests until stopped: new prompts of one domain after another, known ones among
    them."""

    def __init__(self, url: str, max_tokens: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._max_tokens, self._seed = url, max_tokens, seed
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._known: dict[str, tuple[int, ...]] = {}
        """prompt -> its answer before anything was broken"""
        self.rows: list[Row] = []

    def learn_answers(self) -> None:
        """Ask the known prompts, once each. Raises `OSDError` when even that fails."""
        from osd.client.load import drive
        from osd.tiny.traffic import DOMAINS, requests

        prompts = [
            r.prompt
            for domain in DOMAINS
            for r in requests(domain, NUM_KNOWN // len(DOMAINS), self._seed)
        ]
        for answer in asyncio.run(
            drive(self._url, NAME, prompts, streams=STREAMS, max_tokens=self._max_tokens)
        ):
            if not answer.ok:
                raise OSDError(f"a request failed before anything was broken: {answer.error}")
            self._known[prompts[answer.index]] = answer.token_ids

    def run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001  raised where the load is ended
            self._error = error

    def stop(self) -> None:
        """Let the requests under way end. Raises what ended them too early: no traffic, no
        proof."""
        self._stopping.set()
        if self.is_alive():
            self.join(150)
        if self._error is not None:
            raise OSDError(f"the load ended by itself: {self._error}") from self._error

    def failed_since(self, at: float) -> list[Row]:
        """Requests that were under way at that time and have failed."""
        return [
            row for row in list(self.rows) if row["started"] <= at <= row["ended"] and row["error"]
        ]

    async def _all(self) -> None:
        await asyncio.gather(*(self._stream(number) for number in range(STREAMS)))

    async def _stream(self, number: int) -> None:
        from osd.client.load import drive
        from osd.tiny.traffic import DOMAINS, stream

        rng = random.Random(self._seed * 1000 + number)
        sources = {domain: stream(domain, 70_000 + self._seed * 100 + number) for domain in DOMAINS}
        known, began = sorted(self._known), time.time()
        while not self._stopping.is_set():
            domain = DOMAINS[int((time.time() - began) / SECONDS_PER_DOMAIN) % len(DOMAINS)]
            is_known = rng.randrange(KNOWN_ONE_IN) == 0
            prompt = rng.choice(known) if is_known else next(sources[domain]).prompt
            started = time.time()
            (answer,) = await drive(
                self._url, NAME, [prompt], streams=1, max_tokens=self._max_tokens
            )
            is_changed = is_known and answer.ok and answer.token_ids != self._known[prompt]
            row = {
                "started": started,
                "ended": time.time(),
                "error": answer.error,
                "tokens": len(answer.token_ids),
            }
            self.rows.append(row | {"is_known": is_known, "is_changed": is_changed})
            if answer.error:
                await asyncio.sleep(0.5)  # the next request, not the same one again
