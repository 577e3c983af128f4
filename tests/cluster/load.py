"""Traffic from a host, a line of JSON for each round of 24 requests.

    python -m tests.cluster.load URL ROUNDS [SEED]   streamed answers, and the acceptance in them
    python -m tests.cluster.load URL                 whole answers, until standard input ends

SEED names other prompts. Of a whole answer nothing has come before all of it: the request may be
answered by another engine until then.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support import acceptance
from tests.support.traffic import MODEL, PROMPTS, ask, prompt_texts

MAX_TOKENS = 40


def main(url: str, rounds: int = 0, seed: int = 1) -> None:
    prompts = (PROMPTS if seed == 1 else prompt_texts(len(PROMPTS), seed)) * 2
    if not rounds:
        return until_told(url, prompts)
    for _ in range(rounds):
        answers = ask(url, prompts, streams=4, max_tokens=MAX_TOKENS)
        errors = [answer.error for answer in answers if not answer.ok]
        answered = [answer for answer in answers if answer.ok]
        alpha = acceptance.alpha(acceptance.counts(answered)) if answered else 0.0
        digest = digest_of([answer.token_ids for answer in answers])
        print(json.dumps({"errors": errors, "alpha": alpha, "digest": digest}), flush=True)


def until_told(url: str, prompts: Sequence[str]) -> None:
    is_over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=listen, daemon=True).start()
    with httpx.Client(base_url=url, timeout=180) as client, ThreadPoolExecutor(8) as threads:
        while not is_over.is_set():
            found = list(threads.map(lambda prompt: timed(client, prompt), prompts))
            errors = [answer for answer, _ in found if isinstance(answer, str)]
            digest = digest_of([answer for answer, _ in found if not isinstance(answer, str)])
            line = {"errors": errors, "digest": digest, "seconds": [took for _, took in found]}
            print(json.dumps(line), flush=True)


def timed(client: httpx.Client, prompt: str) -> tuple[list[int] | str, float]:
    clock = time.monotonic()
    return whole(client, prompt), time.monotonic() - clock


def whole(client: httpx.Client, prompt: str) -> list[int] | str:
    """The tokens of an answer, or why there is none."""
    message = {"role": "user", "content": prompt}
    body = {"model": MODEL, "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        answer = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    return list(answer.json()["choices"][0]["token_ids"])


def digest_of(answers: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(ids) for ids in answers]).encode()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
