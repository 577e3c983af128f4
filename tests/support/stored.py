"""What Redis and files hold, searched for given token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import redis


def stored_bytes(redis_url: str, *directories: Path) -> Iterator[tuple[str, bytes]]:
    """(place, content) of every value in the server and of every file under the directories."""
    client: Any = redis.Redis.from_url(redis_url, protocol=2)
    readers = {
        b"string": lambda key: [client.get(key)],
        b"hash": lambda key: [part for item in client.hgetall(key).items() for part in item],
        b"set": lambda key: client.smembers(key),
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"stream": lambda key: [
            part for _, fields in client.xrange(key) for item in fields.items() for part in item
        ],
    }
    for key in client.scan_iter(count=1000):
        for value in (key, *readers[client.type(key)](key)):
            yield f"redis {key.decode(errors='replace')}", value or b""
    client.close()
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with suppress(FileNotFoundError):
                    yield str(path), path.read_bytes()


def places_of(token_ids: Sequence[int], redis_url: str, *directories: Path) -> set[str]:
    """The places that hold these token ids: as int32, as JSON, or as text."""
    patterns, stored = _written(token_ids), stored_bytes(redis_url, *directories)
    return {where for where, content in stored if any(pattern in content for pattern in patterns)}


def stored_ones(
    candidates: Sequence[list[int]], redis_url: str, *directories: Path
) -> list[list[int]]:
    """Those candidates that `places_of` would find anywhere."""
    contents = [content for _, content in stored_bytes(redis_url, *directories)]
    return [
        ids
        for ids in candidates
        if any(p in content for p in _written(ids) for content in contents)
    ]


def _written(token_ids: Sequence[int]) -> list[bytes]:
    words = [f"t{i}" for i in token_ids]
    return [
        np.asarray(token_ids, "<i4").tobytes(),
        *(separator.join(map(str, token_ids)).encode() for separator in (",", ", ")),
        " ".join(words).encode(),
        "".join(words).encode(),
    ]
