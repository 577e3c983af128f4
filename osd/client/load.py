"""A client that sends requests in a fixed number of streams and measures each answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from osd.client.http import may_stand_behind_a_proxy
from osd.records import acceptance_rate

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one request, as the client saw it.

    Example:
        Answer(index=3, ok=True, token_ids=(17, 4, 2), text="SELECT", started=1.7e9,
               ttft_s=0.02, seconds=0.12, histogram=(2, 1, 0, 0, 4), num_draft_tokens=28)
    """

    index: int
    ok: bool
    token_ids: tuple[int, ...] = ()
    text: str = ""
    error: str = ""
    started: float = 0.0
    ttft_s: float = 0.0
    """Seconds to the first token."""
    seconds: float = 0.0
    histogram: tuple[int, ...] = ()
    """vLLM's own count: entry j = verification steps that accepted j draft tokens."""
    num_draft_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Sums over answers."""

    num_requests: int
    num_failed: int
    acceptance_rate: float | None
    k: float | None
    """Draft tokens proposed per step of a request. Steps without any count, too."""
    tokens_per_second: float
    """Output tokens of all requests over their wall time."""
    tpot_ms: float | None
    """Milliseconds from first to last token over tokens after the first."""


def figures(answers: Sequence[Answer], wall_seconds: float | None = None) -> Figures:
    """Sums over answers. The wall time defaults to that from the first start to the last end."""
    good = [a for a in answers if a.ok]
    if wall_seconds is None:
        wall_seconds = max((a.started + a.seconds for a in good), default=0.0) - min(
            (a.started for a in good), default=0
        )
    num_tokens = sum(len(a.token_ids) for a in good)
    later_tokens = sum(max(len(a.token_ids) - 1, 0) for a in good)
    later_seconds = sum(a.seconds - a.ttft_s for a in good)
    accepted = sum(j * count for a in good for j, count in enumerate(a.histogram))
    drafted = sum(a.num_draft_tokens for a in good)
    # A request's last step may accept more than was served.
    steps = sum(
        max(len(a.token_ids) - sum(j * n for j, n in enumerate(a.histogram)), sum(a.histogram))
        for a in good
    )
    return Figures(
        num_requests=len(answers),
        num_failed=len(answers) - len(good),
        acceptance_rate=acceptance_rate(accepted, drafted),
        k=drafted / steps if steps > 0 else None,
        tokens_per_second=num_tokens / wall_seconds if wall_seconds > 0 else 0.0,
        tpot_ms=1000 * later_seconds / later_tokens if later_tokens else None,
    )


async def drive(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    streams: int,
    max_tokens: int = 160,
    temperature: float = 0.0,
    api_key: str = "",
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Ask each prompt as a user message of its own, as `send` does."""
    bodies = [
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        for prompt in prompts
    ]
    return await send(url, bodies, streams=streams, api_key=api_key, on_answer=on_answer)


async def send(
    url: str,
    bodies: Sequence[dict[str, Any]],
    *,
    streams: int,
    api_key: str = "",
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Send requests in order, `streams` at a time: chats when they have messages, else completions.

    `api_key`: the server's bearer token, if it wants one. Answers are in the order of the requests.
    A failed request has an answer, too.
    """
    answers: list[Answer | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        base_url=url,
        timeout=120,
        limits=limits,
        headers=headers,
        trust_env=may_stand_behind_a_proxy(url),
    ) as client:

        async def one_stream() -> None:
            for index, body in waiting:
                answers[index] = answer = await _ask(client, index, {**body, **STREAMED})
                on_answer(answer)

        await asyncio.gather(*(one_stream() for _ in range(streams)))
    return [a for a in answers if a is not None]


async def _ask(client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> Answer:
    started, clock = time.time(), time.perf_counter()
    token_ids: list[int] = []
    text: list[str] = []
    ttft, ended = 0.0, 0.0
    speculation: dict[str, Any] = {}
    try:
        async with client.stream(
            "POST", CHAT if "messages" in body else COMPLETION, json=body
        ) as response:
            if response.status_code != 200:
                reason = (await response.aread()).decode(errors="replace")[:200]
                return Answer(
                    index=index,
                    ok=False,
                    error=f"{response.status_code}: {reason}",
                    started=started,
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return Answer(
                        index=index, ok=False, error=str(chunk["error"])[:200], started=started
                    )
                speculation = (chunk.get("metrics") or {}).get(
                    "speculative_decoding"
                ) or speculation
                for choice in chunk["choices"]:
                    text.append(
                        choice["delta"].get("content") or ""
                        if "delta" in choice
                        else choice["text"]
                    )
                    if choice.get("token_ids"):
                        ended = time.perf_counter() - clock
                        ttft = ttft or ended
                        token_ids += choice["token_ids"]
    except httpx.HTTPError as error:
        return Answer(
            index=index, ok=False, error=f"{type(error).__name__}: {error}", started=started
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        told = f"a line of the answer cannot be read ({type(error).__name__}: {error})"
        return Answer(index=index, ok=False, error=told[:200], started=started)
    return Answer(
        index=index,
        ok=bool(token_ids),
        error="" if token_ids else "no tokens",
        token_ids=tuple(token_ids),
        text="".join(text),
        started=started,
        ttft_s=ttft,
        seconds=ended,
        histogram=tuple(speculation.get("acceptance_histogram", ())),
        num_draft_tokens=int(speculation.get("num_draft_tokens", 0)),
    )
