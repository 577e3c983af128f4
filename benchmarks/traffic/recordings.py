"""Recordings of the drift benchmark's traffic in the user's cache, so that a target answers each
prompt only once.

A stream of requests (family, domain, block) is recorded in chunks, so a schedule that needs more of
it records only what is missing. The cache key covers the target's fingerprint, the prompts and all
settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replays.recording import Recorded, record
from benchmarks.traffic.family import FAMILIES
from benchmarks.traffic.schedule import Arrival
from osd.models.resolve import fingerprint
from osd.tiny.cache import build_once

TOP_K = 64
CHUNK = 96
"""Requests in a file."""
FORMAT = 1
"""To be raised when what a recording is changes."""
FILE = "requests.npz"
_ARRAYS = tuple(
    field.name for field in fields(Recorded) if field.name not in ("name", "temperature")
)
_PER_PROMPT = "prompt_ids"


def take(family: str, domain: str, block: int, num: int) -> list[Recorded]:
    """The first `num` requests of a stream with the target's answers, recorded where they are
    missing."""
    chosen = FAMILIES[family]
    target, _ = chosen.models()
    num_chunks = -(-num // CHUNK)
    prompts = chosen.prompts(domain, block, num_chunks * CHUNK)
    found: list[Recorded] = []
    for number in range(num_chunks):
        found += _chunk(
            family, target, domain, block, number, prompts[number * CHUNK : (number + 1) * CHUNK]
        )
    return found[:num]


def in_order(family: str, block: int, coming: Sequence[Arrival]) -> list[Recorded]:
    """The recorded requests of a schedule as they arrive, named by their place: nothing tells their
    domain."""
    needed = {a.domain: 1 + max(b.index for b in coming if b.domain == a.domain) for a in coming}
    streams = {domain: take(family, domain, block, num) for domain, num in needed.items()}
    return [
        replace(streams[arrival.domain][arrival.index], name=f"{block}-{place}")
        for place, arrival in enumerate(coming)
    ]


def _chunk(
    family: str, target: Path, domain: str, block: int, number: int, prompts: Sequence[str]
) -> list[Recorded]:
    chosen = FAMILIES[family]
    settings = [FORMAT, TOP_K, chosen.max_tokens, chosen.temperature, prompts]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    stream = f"{chosen.recorded_as or family}-{domain}-{block}-{number}"
    name = f"recordings/{_fingerprint(target)}/{stream}-{key}"

    def build(directory: Path) -> None:
        recorded = record(
            target,
            prompts,
            top_k=TOP_K,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            seed=block * 1000 + number,
            progress=lambda num: None,
        )
        save(recorded, directory / FILE)

    return load(build_once(name, build) / FILE, chosen.temperature)


@cache
def _fingerprint(target: Path) -> str:
    return fingerprint(target)


def save(recorded: Sequence[Recorded], path: Path) -> None:
    """Write requests to a file: each array end to end, and where the requests begin."""
    stored: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in recorded]) for name in _ARRAYS
    }
    stored["prompt_bounds"] = np.cumsum([len(one.prompt_ids) for one in recorded])[:-1]
    stored["output_bounds"] = np.cumsum([len(one.output_ids) for one in recorded])[:-1]
    stored["names"] = np.array([one.name for one in recorded])
    np.savez(path, **stored)


def load(path: Path, temperature: float) -> list[Recorded]:
    """What `save` wrote of answers sampled at that temperature."""
    with np.load(path) as stored:
        split = {
            name: np.split(
                stored[name], stored["prompt_bounds" if name == _PER_PROMPT else "output_bounds"]
            )
            for name in _ARRAYS
        }
        names = stored["names"].tolist()
    return [
        Recorded(name=name, temperature=temperature, **{key: split[key][index] for key in _ARRAYS})
        for index, name in enumerate(names)
    ]
