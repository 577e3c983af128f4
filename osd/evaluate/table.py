"""The table: a row for each arm under each load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from osd.evaluate.bound.own import Bound, closed_by_auto
from osd.evaluate.bound.speeds import ALL
from osd.evaluate.figures import PARTS, Figures, Ratio, Tails
from osd.evaluate.plan import CLOSED, DRAFT, MEMORY, NONE
from osd.evaluate.success import Success

HEADER = (
    "method", "k", "tokens/s", "over none", "TTFT ms", "TPOT ms", "latency ms", "length",
    "drafted", "verified", "step ms", *PARTS, "T1/T1+k",
)  # fmt: skip
NOTES = (
    "over none: tokens/s over those of none in the same engine, the median of the pairs (lowest to "
    "highest)",
    "TTFT, TPOT, latency: p50 / p99.  length: acceptance length, 1 + accepted / drafts",
    "drafted, verified: draft tokens proposed, and tokens that the target computed, per step of a "
    "request",
    "step ms: of steps that only decode, then its parts.  T1/T1+k: target efficiency",
)


def table(figures: Sequence[Figures], bounds: Sequence[Bound], successes: Sequence[Success]) -> str:
    """As text, a block for each load and temperature."""
    lines: list[str] = []
    rows = [row_of(one) for one in figures]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for group, indices in groups(figures).items():
        lines += [group, "  " + _line(HEADER, widths)]
        lines += ["  " + _line(rows[i], widths) for i in indices]
    return "\n".join([*lines, *NOTES, *_below(figures, bounds, successes)])


def _below(
    figures: Sequence[Figures], bounds: Sequence[Bound], successes: Sequence[Success]
) -> Iterator[str]:
    yield from (said_of_bound(one, figures) for one in bounds)
    yield from _unbounded(figures, bounds)
    yield from map(said_of, successes)
    yield from verdicts(figures)


def _unbounded(figures: Sequence[Figures], bounds: Sequence[Bound]) -> Iterator[str]:
    """Loads that should have a bound and have none."""
    known = {(one.load, one.temperature) for one in bounds}
    wanted = {
        (one.load, one.temperature): None
        for one in figures
        if one.method in (DRAFT, MEMORY) and one.load.startswith(CLOSED)
    }
    for load, temperature in wanted:
        if (load, temperature) not in known:
            yield (
                f"upper bound, {load}, temperature {temperature:g}: none, as too few steps with "
                "all requests tell what they took, or the draft cannot be replayed"
            )


def said_of_bound(bound: Bound, figures: Sequence[Figures]) -> str:
    """In one line: who knows what will be accepted, beside the best fixed length, and how far the
    control has come from there."""
    fixed = bound.best_fixed
    line = (
        f"upper bound, {bound.load}, temperature {bound.temperature:g}: {bound.speeds[ALL]:.2f} "
        f"over none; best fixed choice {bound.speeds[fixed]:.2f} ({fixed})"
    )
    closed = closed_by_auto(bound, figures)
    return line if closed is None else f"{line}; auto closes {closed:.0%} of the gap"


def said_of(success: Success) -> str:
    """In one line."""
    shares = ", ".join(f"{share:.2f}" for share in success.by_k)
    return (
        f"draft's k likeliest hold the served token, k = 1 to {len(success.by_k)}: {shares} "
        f"({success.data}, temperature {success.temperature:g}, {success.num_tokens} tokens)"
    )


def groups(figures: Sequence[Figures]) -> dict[str, list[int]]:
    """Load and temperature -> places of its figures."""
    found: dict[str, list[int]] = {}
    for i, one in enumerate(figures):
        found.setdefault(f"{one.load}, temperature {one.temperature:g}", []).append(i)
    return found


def row_of(one: Figures) -> tuple[str, ...]:
    """One arm, in the columns of `HEADER`."""
    of_engine = f" ({one.engine})" if one.method == NONE and one.engine != NONE else ""
    return (
        f"{one.method}{of_engine}",
        str(one.k or "-"),
        f"{one.tokens_per_second:.1f}",
        _ratio(one.over_none),
        *(_tails(tails) for tails in (one.ttft, one.tpot, one.latency)),
        _number(one.acceptance_length),
        f"{one.drafted_per_step:.2f}",
        f"{one.verified_per_step:.2f}",
        f"{one.step_ms:.2f}",
        *(_number(one.parts_ms.get(part)) for part in PARTS),
        _number(one.target_efficiency),
    )


def verdicts(figures: Sequence[Figures]) -> list[str]:
    """What does not hold as it should, or that it does."""
    compared = sum(one.num_compared for one in figures)
    different = sum(one.num_different for one in figures)
    found = []
    if compared:
        said = f"{different} DIFFERENT" if different else "all identical, token for token"
        found.append(f"answers: {compared} compared with those of none at temperature 0: {said}")
    if wrong := [one for one in figures if not one.agrees_with_vllm]:
        named = ", ".join(f"{one.arm.name} at {one.load}" for one in wrong)
        found.append(f"vLLM's own counters: DIFFER from what was written down: {named}")
    else:
        found.append("vLLM's own counters: equal to what was written down, step by step")
    return found


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    spread = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.num > 1 else ""
    return f"{ratio.value:.2f}{spread}"


def _tails(tails: Tails) -> str:
    p50, p99 = (
        f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f}" for seconds in (tails.p50, tails.p99)
    )
    return f"{p50} / {p99}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
