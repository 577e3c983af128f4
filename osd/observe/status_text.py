"""What `osd status` and `osd drafts list` print: plain text of what the control port answers.

The first line of a status is the worst problem with its remedy, or "all is well"; what is below it
explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from osd.common.wording import counted, percent, size, span
from osd.observe.problems import last_outcome, learnable, problems_of
from osd.records import DraftView, Event, Figures, ServiceStatus, SpeculationFigures

NUM_EVENTS = 3
NUM_SOUGHT = 1000
"""Newest events among which the last training round's end is sought: each of many replicas may have
swapped since."""
LEFT_OUT_SHOWN = 4
LEFT_OUT = {
    "memory": "the memory cannot propose",
    "sleep": "the draft does not sleep at k = 0",
    "net": "the net speed-up is not measured",
}


def page(status: ServiceStatus, events: Sequence[Event]) -> str:
    """The page. `events`: newest first, enough of them to find the last training round's end."""
    outcome = last_outcome(events)
    return "\n".join(
        [
            *_headline(problems_of(status, events)),
            *_service(status),
            _row("recent", _figures(status.recent)),
            *([_row("tokens", f"by source: {text}")] if (text := brought(status.recent)) else []),
            *_training(status, outcome),
            *_buffer(status),
            *_replicas(status),
            _row("learnable", _learnable(status)),
            *_events(status, events[:NUM_EVENTS]),
        ]
    )


def drafts_table(drafts: Sequence[DraftView], now: float) -> str:
    """What `osd drafts list` prints: a line per release, oldest first."""
    rows: list[tuple[str, ...]] = [
        ("draft", "from", "made", "age", "α predicted", "α served", "state")
    ]
    for draft in drafts:
        made = draft.kind if draft.num_steps else "given"
        alphas = [
            f"{alpha:.3f}" if alpha is not None else "-"
            for alpha in (draft.predicted_alpha, draft.served_alpha)
        ]
        parent = f"v{draft.parent}" if draft.parent else "-"
        age = span(now - draft.created_at)
        rows.append((f"v{draft.version}", parent, made, age, *alphas, _state(draft)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _state(draft: DraftView) -> str:
    states = [name for name in ("serving", "pinned", "kept") if getattr(draft, name)]
    if draft.bad:
        states.append(f"not offered again: {draft.bad_reason}")
    return ", ".join(states)


def _row(name: str, text: str) -> str:
    return f"{name:<11} {text}"


def _headline(found: list[str]) -> Iterator[str]:
    yield found[0] if found else "all is well"
    for text in found[1:]:
        yield _row("also", text)


def _service(status: ServiceStatus) -> Iterator[str]:
    where = status.url or ", ".join(replica.url for replica in status.replicas) or "no address"
    yield _row("service", f"{status.deployment} at {where}, up {span(status.uptime_s)}")
    yield _row("target", f"{status.target} (id {status.target_id})")
    version = f"v{status.version}" + (" (pinned)" if status.pinned else "")
    yield _row(
        "draft", f"{version}, begun from {status.draft}; {_proposes(status)}{_promise(status)}"
    )


def _proposes(status: ServiceStatus) -> str:
    most = counted(status.k, "token")
    match status.mode:
        case "off":
            return "proposes nothing (speculation.mode=off)"
        case "fixed" if status.proposers[0] == "memory":
            return "the memory proposes in its place (speculation.mode=fixed)"
        case "fixed":
            return f"proposes {most} a step (speculation.mode=fixed)"
    return f"proposes up to {most} a step"


def _promise(status: ServiceStatus) -> str:
    """What the gate predicted of the serving draft, and what it serves with."""
    predicted, served = status.predicted_alpha, status.served_alpha
    if predicted is None:
        return ""
    return f"; alpha {predicted:.2f} predicted" + (
        f", {served:.2f} served" if served is not None else ""
    )


def _figures(recent: Figures) -> str:
    if not recent.seconds:
        return "no traffic in the last 5 min"
    rate = recent.acceptance_rate
    parts = [
        f"acceptance rate {percent(rate, 1)}" if rate is not None else "",
        _figure(recent.alpha, "alpha {:.3f}"),
        _figure(recent.acceptance_length, "length {:.2f}"),
        _figure(recent.tokens_per_second, "{:.0f} tokens/s"),
        _figure(recent.requests, "{:.0f} requests"),
    ]
    return f"{', '.join(part for part in parts if part)} in the last {span(recent.seconds)}"


def brought(figures: Figures) -> str:
    """Who brought which share of the tokens; "" where nobody but the target did."""
    shares = {name: share for name, share in figures.shares().items() if share}
    if not shares.keys() - {"target"}:
        return ""
    return ", ".join(f"{name} {percent(share, 1)}" for name, share in shares.items())


def _figure(value: float | None, text: str) -> str:
    return text.format(value) if value is not None else ""


def _training(status: ServiceStatus, outcome: Event | None) -> Iterator[str]:
    yield _row("trainer", trainer_state(status))
    if outcome is not None:
        yield _row(
            "last round",
            f"{outcome.kind} {span(status.now - outcome.at)} ago: {outcome.text}",
        )
    if (payback := status.payback) is not None:
        yield _row(
            "payback",
            f"a round takes {payback.taken_s:.1f} s from the engines ({payback.slowdown:.2f}x as "
            f"slow meanwhile), and may save {payback.saved_s:.1f} s in {span(payback.within_s)}",
        )
    rounds, swaps, rollbacks = status.num_rounds, status.num_swaps, status.num_rollbacks
    yield _row(
        "so far",
        f"{counted(rounds, 'round')}, {counted(swaps, 'swap')}, {counted(rollbacks, 'rollback')} "
        "in history",
    )


def trainer_state(status: ServiceStatus) -> str:
    """What the trainer does, or why it idles."""
    if not status.training:
        return "off: trainer.enabled is false"
    if status.trainer != "ok":
        return "failing, tried again by itself"
    detail = status.phase_detail
    if status.phase in ("training", "comparing"):
        return f"{status.phase} {detail}"
    if status.paused:
        return "idle: paused by hand"
    if detail.startswith("at rest"):
        return f"idle, {detail}"
    return f"idle: it has {detail}" if detail else "idle: looking for new traces"


def _buffer(status: ServiceStatus) -> Iterator[str]:
    stats = status.buffer
    if stats is None:
        yield _row("buffer", "not read yet")
        return
    oldest = f", oldest {span(status.now - stats.oldest_at)} old" if stats.oldest_at else ""
    dropped = dict(stats.dropped)
    for replica in status.replicas:
        for reason, num in replica.buffer_dropped.items():
            dropped[reason] = dropped.get(reason, 0) + num
    lost = ", ".join(f"{reason} {num}" for reason, num in sorted(dropped.items()) if num)
    traces, held_out = counted(stats.num_traces, "trace"), stats.num_holdout
    held = f"{traces} and {held_out} held out, {size(stats.num_bytes)}"
    yield _row("buffer", f"{held}{oldest}; dropped: {lost or 'none'}")


def _replicas(status: ServiceStatus) -> Iterator[str]:
    alive = {replica.replica for replica in status.replicas}
    draining = {member.replica for member in status.members if not member.is_wanted}
    for member in status.members:
        if member.replica not in alive:
            why = f": {member.why}" if member.why else ""
            yield _row(member.replica, f"{member.state} for {span(status.now - member.since)}{why}")
    for replica in status.replicas:
        state = "in step"
        if not replica.is_swapped:
            state = "no swaps"
        elif replica.version != replica.wanted:
            state = f"{'lagging' if replica.lagging else 'swapping'}, wanted is v{replica.wanted}"
        if replica.replica in draining:
            state += ", draining"
        running = counted(replica.num_running, "request")
        at = f", at {replica.url}" if status.url else ""
        yield _row(
            replica.replica,
            f"v{replica.version} ({state}), {running} running, {replica.engine}{at}",
        )
        if replica.steps is not None:
            yield _row("", f"attached: {', '.join(replica.steps) or 'all is off'}")
        if unproved := replica.unproved:
            yield _row("", f"its swaps are not proved by reading the draft back: {unproved}")
        for part, reason in sorted(replica.off.items()):
            yield _row("", f"{part} is off: {reason}")
        if figures := replica.speculation_figures:
            yield from _speculation(figures)
        left_out = replica.speculation.left_out if replica.speculation else {}
        for what, why in sorted(left_out.items()):
            yield _row("", f"{LEFT_OUT.get(what, what)}: {why}")


def _speculation(figures: SpeculationFigures) -> Iterator[str]:
    """What the replica speculates now, and what that brings."""
    plan = " ".join(
        part for part in (figures.plan, _figure(figures.batch, "at batch {:.0f}")) if part
    )
    speeds = [
        _figure(figures.predicted_tokens_per_second, "{:.0f} tokens/s predicted"),
        _figure(figures.measured_tokens_per_second, "{:.0f} tokens/s measured so far"),
    ]
    share = figures.off_share
    without = f"{percent(share, 1)} of steps without speculation" if share is not None else ""
    now = ", ".join(part for part in (plan, *speeds, without) if part)
    yield _row("", f"{figures.mode or 'speculation'}: {now or 'nothing is known yet'}")
    yield _row(
        "",
        "; ".join(part for part in (_net(figures), _step_time(figures.seconds_per_part)) if part),
    )
    if any(verified for verified, _ in figures.sources.values()):
        yield _row("", _sources(figures.sources))
    if figures.problem:
        yield _row("", f"problem: the control has ended: {figures.problem}")


def _sources(sources: dict[str, tuple[int, int]]) -> str:
    """Whose tokens were accepted, of those that were verified."""
    said = [
        f"{counted(accepted, 'token')} of the {name} ({percent(accepted, verified)} of verified)"
        for name, (verified, accepted) in sources.items()
        if verified
    ]
    return f"accepted: {', '.join(said)}"


def _net(figures: SpeculationFigures) -> str:
    if figures.net_ratio is None:
        return "net speed-up not measured yet"
    windows = counted(round(figures.num_net_windows), "window")
    ratio, low, high = figures.net_ratio, figures.net_low, figures.net_high
    if low is None or high is None:
        return f"net speed-up {ratio:.2f}x in {windows}, too few for an interval"
    return f"net speed-up {ratio:.2f}x ({low:.2f} to {high:.2f}) in {windows}"


def _step_time(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values())
    shares = ", ".join(f"{part} {percent(s, whole)}" for part, s in seconds.items())
    return f"step time: {shares}" if whole else ""


def _learnable(status: ServiceStatus) -> str:
    num_learnt, left_out = learnable(status)
    num_all = num_learnt + left_out.total()
    if not num_all:
        return "no request was captured or left out since the replicas started"
    text = f"{percent(num_learnt, num_all)} of {counted(num_all, 'request')} became traces"
    shown = [
        f"{reason} {percent(num, num_all)}" for reason, num in left_out.most_common(LEFT_OUT_SHOWN)
    ]
    rest = left_out.total() - sum(num for _, num in left_out.most_common(LEFT_OUT_SHOWN))
    shown += [f"others {percent(rest, num_all)}"] if rest else []
    return f"{text}; left out: {', '.join(shown)}" if shown else text


def _events(status: ServiceStatus, events: Sequence[Event]) -> Iterator[str]:
    if not events:
        yield _row("events", "none yet")
    for number, event in enumerate(events):
        ago = f"{span(status.now - event.at)} ago"
        yield _row("" if number else "events", f"{ago}, {event.kind}: {event.text}")
