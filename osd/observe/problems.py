"""The problems of a running service, worst first, each with its remedy, found in its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from osd.common.wording import counted, percent, span
from osd.records import NO_TRACES, Event, ServiceStatus

LEFT_OUT_AS_REQUESTS = (
    "opted_out",
    "not_sampled",
    "structured_output",
    "multimodal",
    "prompt_embeds",
    "target_adapter",
    "pooling",
    "budget",
    "gap",
)
"""Reasons of capture that count whole requests; the others count engine steps."""
WORTH_A_WORD = 0.01
"""Share of the requests whose loss is a problem rather than an accident."""


ENDS_OF_A_ROUND = ("published", "refused", "discarded", "publish_failed")


def learnable(status: ServiceStatus) -> tuple[int, Counter[str]]:
    """Requests that became traces and reached the buffer since the replicas started, and those that
    did not by reason (`buffer: REASON` = on the way to the buffer)."""
    left_out: Counter[str] = Counter()
    num_traces = 0
    for replica in status.replicas:
        num_traces += replica.num_traces
        left_out.update(
            {r: n for r, n in replica.capture_skipped.items() if r in LEFT_OUT_AS_REQUESTS}
        )
        left_out.update({f"buffer: {reason}": n for reason, n in replica.buffer_dropped.items()})
    left_out = +left_out
    num_lost = sum(n for reason, n in left_out.items() if reason.startswith("buffer: "))
    return max(0, num_traces - num_lost), left_out


def last_outcome(events: Sequence[Event]) -> Event | None:
    """The event that ended the last training round; `events` newest first."""
    return next((event for event in events if event.kind in ENDS_OF_A_ROUND), None)


def _failed_rounds(events: Sequence[Event]) -> list[Event]:
    """The events that ended rounds whose result was worthless, since one that was of use; newest
    first."""
    ends = [event for event in events if event.kind in ENDS_OF_A_ROUND]
    ends = [event for event in ends if NO_TRACES not in event.text]
    return list(takewhile(lambda event: event.kind == "discarded", ends))


def problems_of(status: ServiceStatus, events: Sequence[Event] = ()) -> list[str]:
    """One line each, worst first; [] when all is well. `events`: newest first, enough of them to
    find the end of the last two training rounds."""
    return [
        *_serving(status),
        *_lost(status),
        *_training(status, events),
        *_ended_controls(status),
    ]


def _serving(status: ServiceStatus) -> Iterator[str]:
    if status.redis != "ok":  # no heartbeat comes through then, so the replicas may be well
        yield (
            "Redis is away, so nothing is learnt and no draft is swapped: start it again, or "
            "repair buffer.redis_url; "
            "answers go on"
        )
    elif not status.replicas and status.engines == "attached":
        yield (
            "no engine is attached, so nothing is learnt: start one with the environment in "
            "`engines.env` of the data directory; its own log says why it is not attached"
        )
    elif not status.replicas and (wanted := [m.replica for m in status.members if m.is_wanted]):
        # One that fell silent just now is still called serving: it is about to be started again.
        yield f"no engine answers, {', '.join(wanted)} starting: see `logs` in the data directory"
    elif not status.replicas:
        yield (
            "no replica is alive, so no request can be answered: its log in `logs` of the data "
            "directory says why; "
            "end it with `osd stop` and serve again"
        )
    for member in status.members:
        if member.why:
            yield (
                f"{member.replica} waits for a machine ({member.why}): see that there is one, "
                "or lower serving.replicas"
            )
        elif member.is_lost and status.replicas:
            yield (
                f"{member.replica} was lost {span(status.now - member.since)} ago, and is started "
                f"again: `osd logs {member.replica}` says more"
            )
    for replica in status.replicas:
        for part, reason in sorted(replica.off.items()):
            if part == "counters":
                yield (
                    f"the counters of {replica.replica} cannot be read ({reason}): restart the "
                    "service if that lasts; the replica's log says why"
                )
            elif part != "control":  # the control says so itself
                yield (
                    f"{part} is off on {replica.replica} ({reason}): `osd doctor` says which "
                    "versions of vLLM fit"
                )
        if replica.capture_skipped.get("hook_error") and "capture" not in replica.off:
            yield (
                f"capture failed on {replica.replica} and is off there: restart the service; "
                "the replica's log "
                "says why"
            )
    if alarm := status.alarm:
        yield f"{alarm}: compare `osd drafts list` with the replicas' logs, or restart the service"
    for replica in status.replicas:
        if replica.lagging and not replica.version:
            yield (
                f"{replica.replica} drafts with no version since a swap failed: wanted is "
                f"v{replica.wanted}; if it is not swapped in soon, restart the service"
            )
        elif replica.lagging:
            yield (
                f"{replica.replica} is lagging: it serves v{replica.version}, wanted is "
                f"v{replica.wanted}; "
                f"if it does not catch up, `osd drafts promote {replica.version}` or restart "
                "the service"
            )


def _lost(status: ServiceStatus) -> Iterator[str]:
    num_learnt, left_out = learnable(status)
    num_all = num_learnt + left_out.total()
    for reason, num in left_out.most_common():
        kind, _, why = reason.partition(": ")
        share = percent(num, num_all)
        if num < WORTH_A_WORD * num_all:
            continue
        if kind == "buffer":
            remedy = BUFFER_REMEDIES.get(why, "the replica's log says what was wrong with them")
            dropped = f"{counted(num, 'trace')} ({why}, {share} of requests)"
            yield f"the buffer dropped {dropped}: {remedy}"
        elif kind == "budget":
            yield (
                f"{counted(num, 'trace')} went over the byte budget ({share} of requests): raise "
                "capture.max_bytes_per_second, or lower capture.top_k"
            )
    yield from _steps_lost(status)


BUFFER_REMEDIES = {
    "redis": "see that Redis can be reached and is fast enough",
    "memory": (
        "raise buffer.max_memory (or maxmemory of your own Redis), or lower buffer.max_traces"
    ),
}


def _steps_lost(status: ServiceStatus) -> Iterator[str]:
    for reason, remedy in (
        ("queue_full", "raise capture.queue_size or lower capture.accepted_fraction"),
        ("assembly_error", "the replica's log says why"),
    ):
        num = sum(replica.capture_skipped.get(reason, 0) for replica in status.replicas)
        num_requests = learnable(status)[0] or 1
        if num > WORTH_A_WORD * num_requests:
            yield f"capture lost {counted(num, 'engine step')} ({reason}): {remedy}"


def _training(status: ServiceStatus, events: Sequence[Event]) -> Iterator[str]:
    outcome, failed = last_outcome(events), _failed_rounds(events)
    if status.trainer != "ok":
        why = f" ({status.trainer_trouble})" if status.trainer_trouble else ""
        yield (
            f"the trainer fails{why}, so the draft does not learn: `logs/trainer.log` in the data "
            "directory of its machine says more; it is tried again by itself"
        )
    elif outcome is not None and outcome.kind == "publish_failed":
        text = outcome.text
        yield f"a better draft could not be published ({text}): make room in releases.dir"
    elif len(failed) > 1:  # after one, the trainer has helped itself: it halved its learning rate
        yield (
            f"the last {len(failed)} training rounds failed ({failed[0].text}): lower "
            "trainer.learning_rate"
        )
    if status.paused:
        yield "training is paused, so the draft does not learn: `osd resume` ends it"


def _ended_controls(status: ServiceStatus) -> Iterator[str]:
    for replica in status.replicas:
        if problem := replica.speculation and replica.speculation.problem:
            yield (
                f"the control of speculation has ended on {replica.replica} ({problem}), so it "
                "always proposes "
                f"{counted(replica.k, 'token')}: restart the service; the replica's log says why"
            )
