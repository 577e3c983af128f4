"""Lets a target answer prompts, and writes what is captured to a file of traces.

The service is that of `osd serve`. `record` starts it, and stops it before it returns.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from buffers import trace_stream
from buffers.base import TraceBuffer
from buffers.codec import encode_trace
from buffers.redis_stream import RedisTraceBuffer
from buffers.trace_file import TraceWriter, write_traces
from osd.client.load import Answer, send
from osd.common.progress import Advance, progress
from osd.config.schema import Config
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.offline.prompts import Asking, Prompt
from osd.offline.recorded import Say
from osd.service.actors import buffer_settings
from osd.service.launch import Service

PORTION = 256
"""Prompts answered before the replay buffer is emptied. It holds far less than a large file of
prompts needs."""
SECONDS_TO_SETTLE = 5.0
"""Traces that have not arrived so long after the newest one will not come."""
TOO_LONG = ("maximum context length", "exceeds model's maximum")
"""Parts of vLLM's errors for a prompt that does not fit."""
REFUSED, FAILED = "refused by the target and skipped", "failed"


class Incomplete(OSDError):
    """Not every prompt was asked. What was captured before is in the file."""


class Stopped(KeyboardInterrupt):
    """The same, by Ctrl-C or SIGTERM (`osd/cli/training.py`)."""


def record(config: Config, prompts: Sequence[Prompt], asking: Asking, path: Path, say: Say) -> None:
    """Let the target answer the prompts, in random order, and write the captured traces to a file.
    Raises `OSDError`, or `KeyboardInterrupt` where it is stopped: `Incomplete` or `Stopped` where
    the file holds a part of them."""
    service = Service(config, say)
    try:
        service.start()
        buffer = RedisTraceBuffer(
            **buffer_settings(service.config, service.redis_url, service.plan.target_id)
        )

        def answer(file: TraceWriter) -> Tally:
            tally = _answer_all(service, buffer, prompts, asking, file, say)
            if not file.num_traces:
                raise OSDError(f"no prompt left a trace ({tally}); see {service.log_dir}")
            return tally

        tally = written(path, service.plan.target_id, answer)
        buffer.close()
        why = _why_not_captured(service) if tally.num_lost else ""
    finally:
        service.stop()
    say(f"prompts: {tally}{why}")


def written(path: Path, target_id: str, answer: Callable[[TraceWriter], Tally]) -> Tally:
    """Write a file of what `answer` captures. Raises what it raises, but `Incomplete` or `Stopped`
    where something was captured before: the file holds that."""
    with write_traces(path, target_id) as file:
        try:
            return answer(file)
        except (OSDError, KeyboardInterrupt) as error:
            if not file.num_traces:
                raise
            failed = error
    raise Incomplete(str(failed)) if isinstance(failed, OSDError) else Stopped from failed


def _why_not_captured(service: Service) -> str:
    """The engine's counts of what it could not capture or store, by reason."""
    registry = Registry(service.redis_url, service.config.deployment)
    replicas = registry.replicas()
    registry.close()
    reasons: Counter[str] = Counter()
    for status in replicas:
        reasons.update(status.capture_skipped)
        reasons.update({f"buffer {reason}": num for reason, num in status.buffer_dropped.items()})
    counts = ", ".join(f"{what} {num}" for what, num in sorted(reasons.items()) if num)
    return f" (not captured because of: {counts})"


def _answer_all(
    service: Service,
    buffer: TraceBuffer,
    prompts: Sequence[Prompt],
    asking: Asking,
    file: TraceWriter,
    say: Say,
) -> Tally:
    serving = service.config.serving
    model = serving.served_model_name or serving.target
    is_chat = "chat_template" in serving.vllm or has_chat_template(service.plan.target_dir)
    bodies = [body_of(prompt, model, asking, is_chat=is_chat) for prompt in prompts]
    # Sorted prompts would be learnt, and held out, in their order.
    random.Random(service.config.trainer.seed).shuffle(bodies)
    tally = Tally()
    with progress("answering", len(bodies), "prompts") as advance:
        for start in range(0, len(bodies), PORTION):
            portion = bodies[start : start + PORTION]
            answers: list[Answer] = []
            sent = send(
                service.url,
                portion,
                streams=asking.streams,
                api_key=serving.api_key,
                on_answer=_tick(advance, answers),
            )
            try:
                asyncio.run(sent)
                _check_alive(answers)
                tally.add(answers, _empty(buffer, _num_ok(answers), file))
            except KeyboardInterrupt:
                say("stopping; what was captured is being kept")
                _empty(buffer, _num_ok(answers), file)
                raise
    return tally


def _tick(advance: Advance, answers: list[Answer]) -> Callable[[Answer], None]:
    """Takes each answer as it comes."""

    def on_answer(answer: Answer) -> None:
        answers.append(answer)
        advance(1, "" if answer.ok else answer.error[:60])

    return on_answer


def _num_ok(answers: Sequence[Answer]) -> int:
    return sum(answer.ok for answer in answers)


class Tally:
    """Counts what became of the prompts, and keeps the first error of each kind."""

    def __init__(self) -> None:
        self.num_lost = 0
        """Answers that left no trace."""
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, answers: Sequence[Answer], num_captured: int) -> None:
        """Count answers, of which `num_captured` left a trace."""
        for answer in answers:
            what = "answered" if answer.ok else _reason(answer.error)
            self._counts[what] += 1
            self._examples.setdefault(what, answer.error)
        self.num_lost += max(0, sum(answer.ok for answer in answers) - num_captured)

    def __str__(self) -> str:
        told = [f"{num} {what}{self._example(what)}" for what, num in sorted(self._counts.items())]
        return ", ".join(
            told + ([f"{self.num_lost} answered but not captured"] if self.num_lost else [])
        )

    def _example(self, what: str) -> str:
        return f" ({self._examples[what]})" if what in (REFUSED, FAILED) else ""


def _reason(error: str) -> str:
    if any(text in error for text in TOO_LONG):
        return "longer than the context, skipped"
    return REFUSED if error.startswith("400") else FAILED


def _check_alive(answers: Sequence[Answer]) -> None:
    """Raise `OSDError` when every answer failed for a reason other than its prompt."""
    if answers and all(not answer.ok and _reason(answer.error) == FAILED for answer in answers):
        raise OSDError(f"the target does not answer: {answers[0].error}")


def _empty(buffer: TraceBuffer, num_expected: int, file: TraceWriter) -> int:
    """Move all traces from the buffer to the file once they have arrived. Returns their number."""
    num, changed_at = -1, time.monotonic()
    while num < num_expected and time.monotonic() - changed_at < SECONDS_TO_SETTLE:
        time.sleep(0.05)
        stats = buffer.stats()
        if (newer := stats.num_traces + stats.num_holdout) != num:
            num, changed_at = newer, time.monotonic()
    before = file.num_traces
    for trace in trace_stream.stored(buffer):
        file.add(encode_trace(trace))
    buffer.purge()
    return file.num_traces - before


def body_of(prompt: Prompt, model: str, asking: Asking, *, is_chat: bool) -> dict[str, Any]:
    """The body of one request. Without a chat template, a prompt is text to continue; with one, it
    is a user message."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens or asking.max_tokens,
        "temperature": asking.temperature,
    }
    if prompt.domain:
        body["vllm_xargs"] = {"osd_domain": prompt.domain}
    if prompt.messages:
        return body | {
            "messages": [{"role": m.role, "content": m.content} for m in prompt.messages]
        }
    if is_chat:
        return body | {"messages": [{"role": "user", "content": prompt.prompt}]}
    return body | {"prompt": prompt.prompt}


def has_chat_template(model: Path) -> bool:
    """Whether the model's tokenizer has a chat template."""
    if any((model / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):
        return False
