"""The lines of a frame, made of the control port's answers. Each has a name and phrases, the most
important first; a narrow terminal drops the last ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from osd.common.wording import counted, size, span
from osd.observe.problems import last_outcome
from osd.observe.status_text import brought, trainer_state
from osd.observe.top.reading import Answers
from osd.records import Event, ReplicaView, RoundOutcome, ServiceStatus

GOOD, BAD, WARN, QUIET = "green", "bold red", "yellow", "dim"
Phrase = tuple[str, str]
"""Text and its style."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line before it is known how much of it there is room for.

    Example:
        Line("buffer", [("812 traces", ""), ("115 held out", "dim")], importance=4)
    """

    name: str
    phrases: list[Phrase]
    importance: int = 0
    """Lines of the loop with the highest go first where there is no room for all."""


def health(answers: Answers, away: str) -> Phrase:
    """The headline: that the service is away, or its worst problem with the remedy."""
    problems = answers.status.problems
    if away:
        return away, BAD
    return (problems[0], BAD) if problems else ("all is well", GOOD)


def others(answers: Answers) -> list[Line]:
    """The problems after the worst."""
    return [Line("also", [(text, WARN)]) for text in answers.status.problems[1:]]


def figures(answers: Answers) -> list[Line]:
    """Acceptance and speed of this moment, and what speculation gains."""
    return [
        Line("now", _now(answers.status)),
        Line("speed-up", [_net(answers.status), *_plans(answers.status)]),
    ]


def _now(status: ServiceStatus) -> list[Phrase]:
    now, most = status.figures, f"k at most {status.k}"
    if not now.seconds:
        return [("no traffic in the last minute", QUIET), (most, QUIET)]
    found = [
        (_figure(now.alpha, "alpha {:.1f} %", 100), "bold cyan"),
        (_figure(now.acceptance_length, "length {:.2f}"), ""),
        (_figure(now.tokens_per_second, "{:.0f} tokens/s"), "bold"),
        (
            _figure(now.k, "k {:.1f} of ") + str(status.k) if now.k is not None else most,
            "",
        ),
        (_figure(now.acceptance_rate, "acceptance rate {:.1f} %", 100), ""),
        (_figure(now.tpot_ms, "TPOT {:.1f} ms"), ""),
        (f"over {span(now.seconds)}", QUIET),
    ]
    return [(text, style) for text, style in found if text]


def _figure(value: float | None, text: str, factor: float = 1) -> str:
    return text.format(factor * value) if value is not None else ""


def _net(status: ServiceStatus) -> Phrase:
    """Speed with speculation over without, as measured: the mean over replicas, as in the
    history."""
    reports = [r.speculation_figures for r in status.replicas if r.speculation_figures]
    measured = [report for report in reports if report.net_ratio is not None]
    if not measured:
        return "net, not measured yet", QUIET
    ratio = _mean([report.net_ratio for report in measured])
    low = _mean([report.net_low for report in measured])
    high = _mean([report.net_high for report in measured])
    windows = counted(round(sum(report.num_net_windows for report in measured)), "window")
    if low is None or high is None:
        return f"net {ratio:.2f}x measured in {windows}, too few for an interval", ""
    tone = GOOD if low > 1 else WARN if high < 1 else ""
    return f"net {ratio:.2f}x ({low:.2f} to {high:.2f}) measured in {windows}", tone


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _plans(status: ServiceStatus) -> list[Phrase]:
    reports = [r.speculation_figures for r in status.replicas if r.speculation_figures]
    plans = Counter(f"{report.mode}: {report.plan}" for report in reports if report.plan)
    return [(plan, QUIET) for plan, _ in plans.most_common()]


def loop(answers: Answers) -> list[Line]:
    """From the requests to the replicas, one line for each stage."""
    status, outcome = answers.status, last_outcome(answers.events)
    return [
        Line("requests", _requests(status), 5),
        Line("rows", _rows(status), 3),
        Line("buffer", _buffer(status), 4),
        Line("trainer", _trainer(status), 0),
        Line("gate", _gate(status, outcome), 2),
        Line("release", _release(status), 6),
        Line("replicas", _replicas(status), 1),
    ]


def _requests(status: ServiceStatus) -> list[Phrase]:
    now = status.figures
    rate = now.requests / now.seconds if now.requests else 0.0
    running = sum(replica.num_running for replica in status.replicas)
    sources = brought(now)
    return [
        (f"{rate:.1f}/s", ""),
        (f"{running} running", ""),
        *([(f"tokens: {sources}", "")] if sources else []),
    ]


def _rows(status: ServiceStatus) -> list[Phrase]:
    replicas = status.replicas
    rows = _merged(replica.capture_rows for replica in replicas)
    skipped = _merged(replica.capture_skipped for replica in replicas)
    dropped = _merged(replica.buffer_dropped for replica in replicas) + Counter(
        status.buffer.dropped if status.buffer else {}
    )
    return [
        (f"{rows.total():,} captured", ""),
        (f"dropped {_listed(dropped)}", WARN if dropped.total() else ""),
        (f"skipped {_listed(skipped)}", ""),
        *([(_listed(rows), QUIET)] if rows else []),
    ]


def _merged(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """reason -> how many, over all replicas"""
    return sum((Counter(count) for count in counts), Counter())


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{reason} {num:,}" for reason, num in counts.most_common() if num) or "none"


def _buffer(status: ServiceStatus) -> list[Phrase]:
    stats = status.buffer
    away = [("Redis is away", BAD)] if status.redis != "ok" else []
    if stats is None:
        return away or [("not read yet", QUIET)]
    oldest = (
        [(f"oldest {span(status.now - stats.oldest_at)} old", QUIET)] if stats.oldest_at else []
    )
    held = [(f"{stats.num_traces:,} traces", ""), (f"{stats.num_holdout:,} held out", "")]
    return [*away, *held, (size(stats.num_bytes), QUIET), *oldest]


def _trainer(status: ServiceStatus) -> list[Phrase]:
    is_ill = status.training and status.trainer != "ok"
    tone = BAD if is_ill else WARN if status.paused else GOOD if status.phase == "training" else ""
    return [(trainer_state(status), tone), *_last_round(status.last_round)]


def _last_round(last: RoundOutcome | None) -> list[Phrase]:
    if last is None:
        return [("no round yet", QUIET)]
    if last.discarded:
        return [(f"last round discarded: {last.discarded}", WARN)]
    loss = [(f"loss {last.loss_first:.2f} to {last.loss_last:.2f}", "")] if last.num_steps else []
    return [*loss, (f"{last.num_tokens:,} rows in {span(last.seconds)}", QUIET)]


def _gate(status: ServiceStatus, outcome: Event | None) -> list[Phrase]:
    if outcome is None:
        return [("nothing judged yet", QUIET)]
    tone = {"published": GOOD, "publish_failed": BAD, "discarded": WARN}.get(outcome.kind, "")
    verdict = f"{outcome.kind.replace('_', ' ')} {_age(status.now - outcome.at)} ago"
    return [(verdict, tone), (outcome.text, "")]


def _release(status: ServiceStatus) -> list[Phrase]:
    predicted, served = status.predicted_alpha, status.served_alpha
    return [
        (
            f"v{status.version}" + (" (pinned)" if status.pinned else ""),
            WARN if status.pinned else "bold",
        ),
        *([(f"alpha {100 * predicted:.1f} % predicted", "")] if predicted is not None else []),
        *([(f"{100 * served:.1f} % served", "")] if served is not None else []),
        (
            f"{counted(status.num_swaps, 'swap')}, {counted(status.num_rollbacks, 'rollback')}",
            "",
        ),
        (f"{counted(status.num_rounds, 'round')} trained", QUIET),
    ]


def _replicas(status: ServiceStatus) -> list[Phrase]:
    """A phrase for each replica. Those that lag come first, so that a narrow terminal shows
    them."""
    found = sorted(status.replicas, key=lambda r: (not r.lagging, r.version == r.wanted))
    alive = {replica.replica for replica in found}
    away = [
        (f"{m.replica} {m.state}", WARN if m.why or m.is_lost else QUIET)
        for m in status.members
        if m.replica not in alive or not m.is_wanted
    ]
    return [*away, *(_replica(replica) for replica in found)] or [("none alive", BAD)]


def _replica(replica: ReplicaView) -> Phrase:
    text = f"{replica.replica} v{replica.version}"
    if replica.version == replica.wanted:
        return f"{text} in step", ""
    state, tone = ("lagging", WARN) if replica.lagging else ("swapping", QUIET)
    return f"{text} {state}, wanted v{replica.wanted}", tone


def events(answers: Answers) -> list[Line]:
    """What happened, the newest first."""
    return [
        Line(
            _age(answers.status.now - event.at),
            [(f"{event.kind.replace('_', ' ')}: {event.text}", "")],
        )
        for event in answers.events
    ]


def _age(seconds: float) -> str:
    """The largest unit alone: `_age(102.0) == "1 min"`."""
    return " ".join(span(seconds).split()[:2])


def foot(answers: Answers, is_live: bool) -> Line:
    """Which service this is."""
    status = answers.status
    leave = [("q leaves", QUIET)] if is_live else []
    where = [
        f"{status.deployment} at {answers.url}",
        f"up {span(status.uptime_s)}",
        f"target {status.target}",
    ]
    return Line("", [*leave, *((text, QUIET) for text in where)])
