"""Reads which token has which id from a model's tokenizer files, and compares two models.

A draft never reads text: its input and output are ids of the target's tokenizer. It fits when every
id means the same token to both. The files are looked for in this order: `tokenizer.json`, then
`vocab.json` with `added_tokens.json`, then `tokenizer.model` (SentencePiece).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osd.errors import ConfigError, first_line


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token -> id. Added (mostly special) tokens are kept apart: a base and a chat model often
    differ in them."""

    file: str
    """Name of the file it was read from."""
    ordinary: Mapping[str, int]
    added: Mapping[str, int]

    @property
    def ids(self) -> dict[str, int]:
        return {**self.ordinary, **self.added}

    @property
    def num_ids(self) -> int:
        """Rows that an embedding needs for all ids."""
        return 1 + max(self.ids.values(), default=-1)


def read(directory: Path) -> Vocabulary | None:
    """The vocabulary of a model; None without a tokenizer file. Raises `ConfigError` for a damaged
    one."""
    for name, reader in (
        ("tokenizer.json", _read_tokenizer_json),
        ("vocab.json", _read_vocab_json),
        ("tokenizer.model", _read_sentencepiece),
    ):
        if (file := directory / name).is_file():
            try:
                return reader(file)
            except Exception as error:  # noqa: BLE001  the three parsers raise types of their own
                raise ConfigError(
                    f"{file}: not a tokenizer that can be read ({first_line(error)})"
                ) from None
    return None


def difference(target: Vocabulary, draft: Vocabulary) -> str:
    """Why the draft cannot use the target's ids; "" when it can.

    Both must have the same ordinary tokens. An added token may be unknown to one of them (it is
    then hardly ever proposed), but must not have another id.
    """
    target_ids, draft_ids = target.ids, draft.ids
    moved = [
        token
        for token in target_ids.keys() & draft_ids.keys()
        if target_ids[token] != draft_ids[token]
    ]
    missing = [token for token in target.ordinary if token not in draft_ids]
    unknown = [token for token in draft.ordinary if token not in target_ids]
    if not (moved or missing or unknown):
        return ""
    different = [*moved, *missing, *unknown]
    token = min(different, key=lambda t: (target_ids.get(t, draft_ids.get(t, 0)), t))
    here, there = target_ids.get(token, "none"), draft_ids.get(token, "none")
    return (
        f"they disagree on {token!r}: id {here} in the target, {there} in the draft; "
        f"{len(different)} such"
    )


def _read_tokenizer_json(file: Path) -> Vocabulary:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    ordinary = tokenizer.get_vocab(with_added_tokens=False)
    everything = tokenizer.get_vocab(with_added_tokens=True)
    return _vocabulary(file, ordinary, {t: i for t, i in everything.items() if t not in ordinary})


def _read_vocab_json(file: Path) -> Vocabulary:
    extra = file.with_name("added_tokens.json")
    return _vocabulary(file, _read_ids(file), _read_ids(extra) if extra.is_file() else {})


def _read_ids(file: Path) -> dict[str, int]:
    ids = json.loads(file.read_text())
    if not isinstance(ids, dict) or not all(type(i) is int for i in ids.values()):
        raise ValueError("not a mapping of tokens to ids")
    return ids


def _read_sentencepiece(file: Path) -> Vocabulary:
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(file))
    extra = file.with_name("added_tokens.json")
    ordinary = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    return _vocabulary(file, ordinary, _read_ids(extra) if extra.is_file() else {})


def _vocabulary(file: Path, ordinary: Mapping[str, int], added: Mapping[str, int]) -> Vocabulary:
    return Vocabulary(file.name, dict(ordinary), dict(added))
