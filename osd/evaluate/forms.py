"""Data sets as they lie on disk, each line or item one request.

    plain          {"prompt": ...} or {"messages": [...]}, with "data", "max_tokens" and "at" (the
                   seconds at which it came) if wanted
    instructcoder  {"instruction", "input", "output"}: an edit of the code in "input"
    alpaca         the same keys: a task, and what it is about
    sharegpt       {"conversations": [{"from": "human", "value": ...}, ...]}, or with "role" and
                   "content": the first message of a human
    cnn_dailymail  {"article", "highlights"}: to be summarised
    gsm8k          {"question", "answer"}, the answer ending in #### and a number
    aime           {"problem", "answer"}, or {"question", "answer"}
    gpqa           {"Question", "Correct Answer", "Incorrect Answer 1", ...}: multiple choice
    spider         {"question", "query", "db_id"}: to be answered in SQL

The form is told by its keys, and that of InstructCoder by the file's name too, unless it is named.
Published files of ShareGPT hold conversations in which no human says anything, and those of
CNN/DailyMail empty articles: these are passed over.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from osd.errors import ConfigError

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv")
NUMBERS = {"max_tokens", "at"}
"""Keys of the plain form, which are text in a CSV file as all else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked.

    Example:
        Question(messages=({"role": "user", "content": "2 + 2 ="},), data="gsm8k")
    """

    messages: tuple[dict[str, Any], ...]
    """A chat; without a chat template its text is continued."""
    data: str
    """Data set."""
    max_tokens: int | None = None
    """Longest answer, where the data says."""
    at: float | None = None
    """When it came, in seconds, where the data says."""


def read(path: Path, form: str | None = None) -> list[Question]:
    """The questions of a file. Raises `ConfigError` with the line, or the item of a list."""
    if form is not None and form not in FORMS:
        raise ConfigError(f"--form: {form!r} is none of {', '.join(FORMS)}")
    found: list[Question] = []
    for where, row in _rows(path):
        form = form or form_of(row, path.stem) or _refuse(where, row)
        try:
            question = FORMS[form](row, path.stem)
            msgspec.json.encode(question)  # half of a surrogate pair is no text
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"--data: {where}: is not of the form {form} ({why})") from None
        if question is not None:
            found.append(question)
    if not found:
        raise ConfigError(f"--data: {path}: holds no request")
    return found


def form_of(row: Row, name: str = "") -> str | None:
    """The form that a row of a file of this name has; None = none of them."""
    keys, known = set(row), name.lower().replace("_", "").replace("-", "")
    answer = str(row.get("answer", ""))
    if keys & {"prompt", "messages"}:
        return "plain"
    if "conversations" in keys:
        return "sharegpt"
    if {"instruction", "output"} <= keys:
        return "instructcoder" if "instructcoder" in known else "alpaca"
    if {"article", "highlights"} <= keys:
        return "cnn_dailymail"
    if {"Question", "Correct Answer"} <= keys:
        return "gpqa"
    if {"question", "query", "db_id"} <= keys:
        return "spider"
    if {"question", "answer"} <= keys and "####" in answer:
        return "gsm8k"
    return "aime" if _first(row, "problem", "Problem", "question", "Question") else None


# -- files ----------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Where each row stands, and the row."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--data: {path}: must end in {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--data: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"--data: {path} line {line}: not UTF-8 text") from None
    if path.suffix == ".csv":
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # no field is longer
        reader = csv.DictReader(io.StringIO(text, newline=""))  # other separators are text
        yield from ((f"{path} line {reader.line_num}", _with_numbers(row)) for row in reader)
    elif path.suffix == ".json":
        yield from _items(path, text)
    else:
        numbered = enumerate(text.split("\n"), 1)
        lines = ((f"{path} line {number}", line) for number, line in numbered if line.strip())
        yield from ((where, _object(where, line)) for where, line in lines)


def _with_numbers(row: Row) -> Row:
    """A row of text, with what has to be a number as one, where it is; without it where it is
    empty."""
    found = dict(row)
    for key in NUMBERS & row.keys():
        if not row[key]:
            del found[key]
            continue
        with suppress(ValueError, RecursionError):
            found[key] = json.loads(row[key])
    return found


def _items(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    """Of a list, or of an object with a list in it."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"--data: {path} line {line}: is not JSON ({error})") from None
    lists = [value for value in tree.values() if isinstance(value, list)] if _is(tree) else [tree]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise ConfigError(f"--data: {path}: must be a list of requests")
    for number, item in enumerate(lists[0], 1):
        if not _is(item):
            raise ConfigError(f"--data: {path} item {number}: is no JSON object")
        yield f"{path} item {number}", item


def _object(where: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--data: {where}: is not JSON ({error})") from None
    if not _is(row):
        raise ConfigError(f"--data: {where}: is no JSON object")
    return dict(row)


def _is(tree: Any) -> bool:
    return isinstance(tree, dict)


def _refuse(where: str, row: Row) -> str:
    keys = ", ".join(map(str, row)) or "none"
    raise ConfigError(
        f"--data: {where}: its keys ({keys}) are of no known form; name it with --form, or give "
        '{"prompt": "..."}'
    )


# -- forms ----------------------------------------------------------------------------------------


def _plain(row: Row, name: str) -> Question:
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("must have either a prompt or messages")
    at, max_tokens = row.get("at"), row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens={max_tokens} must be a whole number of at least 1")
    if at is not None and (type(at) not in (int, float) or not 0 <= at < math.inf):
        raise ValueError(f"at={at} must be seconds")
    messages = row.get("messages", [])
    if "prompt" in row:
        messages = [{"role": "user", "content": _text(row, "prompt")}]
    if not messages or not all(_is(one) and {"role", "content"} <= one.keys() for one in messages):
        raise ValueError("messages must have role and content")
    return Question(
        messages=tuple(messages),
        data=str(row.get("data", name)),
        max_tokens=max_tokens,
        at=None if at is None else float(at),
    )


def _asked(words: str, name: str) -> Question:
    return Question(messages=({"role": "user", "content": words},), data=name)


def _instructcoder(row: Row, name: str) -> Question:
    code = f"{row.get('input') or ''}\n\n".lstrip()
    return _asked(
        f"{code}{_text(row, 'instruction')} Just output the code, do not include any explanation.",
        name,
    )


def _alpaca(row: Row, name: str) -> Question:
    about = row.get("input") or ""
    return _asked(f"{_text(row, 'instruction')}\n\n{about}".strip(), name)


def _sharegpt(row: Row, name: str) -> Question | None:
    said = next(filter(None, map(_said, row["conversations"])), "")
    return _asked(said, name) if said else None


def _said(turn: Row) -> str:
    """What a human says; "" where somebody else speaks."""
    speaker, words = ("from", "value") if "from" in turn else ("role", "content")
    is_human = turn[speaker] in ("human", "user") and turn[words] != ""
    return _text(turn, words) if is_human else ""


def _cnn_dailymail(row: Row, name: str) -> Question | None:
    if row["article"] == "":
        return None
    return _asked(f"Summarize this article:\n\n{_text(row, 'article')}", name)


def _gsm8k(row: Row, name: str) -> Question:
    return _asked(_text(row, "question"), name)


def _aime(row: Row, name: str) -> Question:
    problem = _first(row, "problem", "Problem", "question", "Question")
    if not problem:
        raise KeyError("problem")
    return _asked(f"{problem}\n\nPut the final answer, a number, within \\boxed{{}}.", name)


def _gpqa(row: Row, name: str) -> Question:
    choices = [_text(row, "Correct Answer")]
    choices += [_text(row, f"Incorrect Answer {i}") for i in (1, 2, 3)]
    listed = "\n".join(
        f"({letter}) {choice.strip()}"
        for letter, choice in zip("ABCD", sorted(choices), strict=True)
    )
    return _asked(f"{_text(row, 'Question').strip()}\n\n{listed}", name)


def _spider(row: Row, name: str) -> Question:
    return _asked(f"Database {_text(row, 'db_id')}. Answer in SQL: {_text(row, 'question')}", name)


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be text")
    return value


def _first(row: Row, *keys: str) -> str:
    return next((row[key] for key in keys if isinstance(row.get(key), str) and row[key]), "")


FORMS: dict[str, Callable[[Row, str], Question | None]] = {
    "plain": _plain,
    "instructcoder": _instructcoder,
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "cnn_dailymail": _cnn_dailymail,
    "gsm8k": _gsm8k,
    "aime": _aime,
    "gpqa": _gpqa,
    "spider": _spider,
}
"""By name: what makes a row a question; None where it asks nothing."""
