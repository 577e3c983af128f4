"""From questions to the requests that every arm serves: chosen, in one order, as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from osd.errors import ConfigError, first_line
from osd.evaluate.forms import Question
from osd.evaluate.runs import Request

SEED, NUM_PROMPTS, OTHER = 77_000, 512, "sql"
"""Of the built-in traffic."""
LONGEST_SHOWN = 80
"""Letters of messages, in errors."""


def choose(data: Sequence[Sequence[Question]], num: int, seed: int) -> list[Question]:
    """`num` of each file, drawn at random, in turns from each. Questions with times of arrival are
    not drawn: the first `num` are taken, in their order."""
    if any(question.at is not None for questions in data for question in questions):
        first = chain.from_iterable(questions[:num] for questions in data)
        return sorted(first, key=lambda one: one.at or 0.0)
    drawn = [random.Random(seed).sample(list(each), min(num, len(each))) for each in data]
    return [one for turn in zip_longest(*drawn) for one in turn if one is not None]


def encode(
    questions: Sequence[Question], target: Path, *, max_tokens: int, context: int
) -> tuple[list[Request], int]:
    """Requests, and how many questions were left out since they are empty, which no engine takes,
    or do not fit the context with their answer. Raises `ConfigError` where none is left, or the
    target's tokenizer cannot be loaded."""
    tokenizer = _tokenizer(target)
    found = [_request(question, tokenizer, max_tokens) for question in questions]
    kept = [one for one in found if 0 < len(one.prompt_ids) <= context - one.max_tokens]
    if not kept:
        raise ConfigError(
            f"--data: no request fits the context of {context} tokens with its answer; lower "
            "--max-tokens or raise serving.vllm.max_model_len"
        )
    return kept, len(found) - len(kept)


def _tokenizer(target: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  transformers raises many types
        raise ConfigError(
            f"serving.target={target}: its tokenizer cannot be loaded ({first_line(error)}); put "
            "the tokenizer's files there"
        ) from None


def _request(question: Question, tokenizer: Any, max_tokens: int) -> Request:
    messages = list(question.messages)
    if tokenizer.chat_template:
        ids = _templated(question, tokenizer)
    else:
        ids = tokenizer("\n\n".join(str(message["content"]) for message in messages)).input_ids
    return Request(
        prompt_ids=tuple(ids),
        data=question.data,
        max_tokens=question.max_tokens or max_tokens,
        at=question.at,
    )


def _templated(question: Question, tokenizer: Any) -> list[int]:
    """Raises `ConfigError` where the template refuses the messages: it may not know their roles, or
    take text alone."""
    from jinja2 import TemplateError

    messages = list(question.messages)
    try:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--data: the target's chat template does not take {str(messages)[:LONGEST_SHOWN]} of "
            f"{question.data} ({error}); change these messages"
        ) from None


def stop_tokens(target: Path) -> tuple[int, ...]:
    """Token ids with which the target ends an answer. Raises `ConfigError` for a damaged file."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = target / name
        try:
            tree = json.loads(file.read_text()) if file.is_file() else {}
            ids = tree.get("eos_token_id")
            found.update(map(int, ids if isinstance(ids, list) else [] if ids is None else [ids]))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"serving.target={target}: its {name} cannot be read ({first_line(error)}); repair "
                "the file, or copy the model again"
            ) from None
    return tuple(sorted(found))


def questions_of(traffic: Mapping[str, Sequence[str]]) -> list[list[Question]]:
    """Kinds of traffic as data sets."""
    return [
        [Question(messages=({"role": "user", "content": prompt},), data=kind) for prompt in prompts]
        for kind, prompts in traffic.items()
    ]


def built_in_traffic() -> dict[str, list[str]]:
    """Of a built-in target: what its draft knows, and another kind."""
    from osd.tiny.traffic import HOME, requests

    return {
        domain: [one.prompt for one in requests(domain, NUM_PROMPTS, SEED)]
        for domain in (HOME, OTHER)
    }
