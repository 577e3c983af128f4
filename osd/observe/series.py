"""Slots as columns of a chart: one row per bucket, and lines by class of traffic, replica or
position."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from osd.observe.slots import Key, SpeculationTimes
from osd.records import SOURCES, Counters

PARTS = ("draft", "verify", "sample", "other")
COLUMNS = (
    "at",
    "alpha",
    "acceptance_rate",
    "acceptance_length",
    "tested",
    "tokens_per_second",
    "tpot_ms",
    "version",
    "k",
    "requests",
    "net_ratio",
    "net_low",
    "net_high",
    *(f"share_{part}" for part in PARTS),
    "steps",
    *(f"tokens_{source}" for source in SOURCES),
    "verified_draft",
    "verified_memory",
)
"""Of every history answer."""
AHEAD_S = 60.0
"""What was counted so long after now was counted by a clock that was set back since: a row for each
second until then would be too many."""
MAX_LINES = 12
"""Lines of one answer: those with most tested tokens."""

T = TypeVar("T")
CountItems = Iterable[tuple[Key, Counters]]
"""((start, replica, version, k), counts)"""


def columns(
    counts: CountItems, steps: Iterable[tuple[Key, SpeculationTimes]], bucket_s: float
) -> dict[str, list[Any]]:
    """`COLUMNS`, one row per bucket from the first to the last with counts; None where nothing was
    seen.

    `at` is a bucket's start, `version` is the one most tokens came from, `k` the draft tokens
    proposed per request and step, `tokens_per_second` counts only the time in which a replica had
    work, and adds replicas up. `net_*` is the mean over replicas of what each had measured by then.
    `tokens_*` are the output tokens by who brought them, in `steps` of a request.
    """
    by_bucket, steps_by_bucket = _buckets(counts, bucket_s), _buckets(steps, bucket_s)
    made: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for index in _range(by_bucket):
        row = (
            _row(by_bucket.get(index, []))
            | _steps_row(steps_by_bucket.get(index, []))
            | {"at": index * bucket_s}
        )
        for name in COLUMNS:
            made[name].append(_short(row.get(name)))
    return made


def lines(
    counts: CountItems, bucket_s: float, at: list[float], label: int | None
) -> dict[str, dict[str, list[float | None]]]:
    """name -> acceptances, one value for each of `at`.

    `label` is the place in the key that names a line; None = a line for each position in the draft
    (1 = first), of which only alpha is known.
    """
    split = _by_position if label is None else _by_label(label)
    sums: dict[str, dict[int, Counters]] = {}
    for key, value in counts:
        for name, part in split(key, value):
            line = sums.setdefault(name, {})
            line.setdefault(math.floor(key[0] / bucket_s), Counters()).add(part)
    most = sorted(
        sums, key=lambda name: -sum(sum(c.num_tested_per_pos) for c in sums[name].values())
    )[:MAX_LINES]
    rows = [round(start / bucket_s) for start in at]
    return {name: _line(sums[name], rows) for name in sorted(most, key=_by_number)}


def _line(sums: dict[int, Counters], rows: list[int]) -> dict[str, list[float | None]]:
    found = [sums[row].acceptance() if row in sums else {} for row in rows]
    return {name: [_short(row.get(name)) for row in found] for name in Counters().acceptance()}


def _short(value: Any) -> Any:
    """Rounded to six decimals, which are more than a chart shows and keep the JSON short."""
    return round(value, 6) if isinstance(value, float) else value


def _by_label(label: int) -> Any:
    return lambda key, value: [(str(key[label]), value)]


def _by_position(_: Key, value: Counters) -> Iterator[tuple[str, Counters]]:
    pairs = zip(value.num_tested_per_pos, value.num_accepted_tokens_per_pos, strict=False)
    for position, (tested, accepted) in enumerate(pairs, start=1):
        yield (
            str(position),
            Counters(num_tested_per_pos=[tested], num_accepted_tokens_per_pos=[accepted]),
        )


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)


def _buckets(items: Iterable[tuple[Key, T]], bucket_s: float) -> dict[int, list[tuple[Key, T]]]:
    found: dict[int, list[tuple[Key, T]]] = {}
    latest = time.time() + AHEAD_S
    for key, value in items:
        if key[0] <= latest:
            found.setdefault(math.floor(key[0] / bucket_s), []).append((key, value))
    return found


def _range(buckets: dict[int, Any]) -> Iterable[int]:
    return range(min(buckets), max(buckets) + 1) if buckets else ()


def _row(found: list[tuple[Key, Counters]]) -> dict[str, Any]:
    """One bucket's values; {} without data."""
    if not found:
        return {}
    total, tokens, per_replica = Counters(), Counter[tuple[int, int]](), dict[str, list[float]]()
    for (_, replica, version, k), counts in found:
        total.add(counts)
        tokens[version, k] += counts.num_output_tokens
        done = per_replica.setdefault(replica, [0.0, 0.0])
        done[0] += counts.num_output_tokens
        done[1] += counts.seconds
    version, k = max(tokens, key=lambda key: (tokens[key], key))
    speeds = [num_tokens / seconds for num_tokens, seconds in per_replica.values() if seconds > 0]
    return total.acceptance() | {
        "tested": sum(total.num_tested_per_pos),
        "tokens_per_second": sum(speeds) if speeds else None,
        "tpot_ms": 1000 * total.decode_seconds / total.num_decode_tokens
        if total.num_decode_tokens
        else None,
        "version": version,
        "k": _k_used([counts for _, counts in found], k),
        "requests": total.num_finished,
        "steps": total.num_steps,
        "verified_draft": total.num_draft_tokens,
        "verified_memory": total.num_memory_tokens,
        **{f"tokens_{source}": num for source, num in total.by_source().items()},
    }


def _k_used(found: list[Counters], k: int) -> float | None:
    """Draft tokens per request and step; `k`, the most there may be, where steps were not counted;
    None without any."""
    counted = [counts for counts in found if counts.num_steps]
    num_steps = sum(counts.num_steps for counts in counted)
    if num_steps:
        return round(sum(counts.num_draft_tokens for counts in counted) / num_steps, 2)
    return k if any(counts.num_output_tokens for counts in found) else None


def _steps_row(found: list[tuple[Key, SpeculationTimes]]) -> dict[str, float | None]:
    latest: dict[str, tuple[float, float | None, float | None]] = {}
    seconds: Counter[str] = Counter()
    for (_, replica), times in found:
        if times.net:
            latest[replica] = times.net
        seconds.update(times.seconds_per_part)
    whole = seconds.total()
    row = {f"share_{part}": seconds[part] / whole if whole else None for part in PARTS}
    nets = zip(*latest.values(), strict=True)
    return row | dict(zip(("net_ratio", "net_low", "net_high"), map(_mean, nets), strict=False))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
