"""The story of `osd demo`: the whole loop on this machine, with tiny models and real vLLM.

    home traffic    ──► the traffic  ──► the draft    ──► training     ──► controls on the
    (the draft's        shifts           learns           pauses           same requests:
     own domain)        (acceptance      (and is          (nothing         frozen first draft,
                        and speed        swapped          moves while      adapted draft,
                        fall)            in, live)        measuring)       no speculation

The demo is a client of a service that runs as under `osd serve`. No request names its domain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from osd.client.http import Client
from osd.client.load import Answer, drive
from osd.demo.screen import Screen
from osd.errors import OSDError
from osd.exchange.registry import Registry
from osd.records import DraftView, SpecWindow, SwapReport
from osd.service.launch import Service
from osd.tiny.traffic import HOME, requests

SHIFTED = "sql"
SEED = 20_000
"""Traffic seed of the demo; the models were trained on others."""
STREAMS = 4
NUM_HOME, NUM_SHIFTED = 72, 336
NUM_BEFORE, NUM_AFTER, NUM_RECOVERED = 60, 50, 80
"""Requests in the windows before the shift, after it, and at the end."""
FIRST_CONTROL = NUM_SHIFTED - NUM_RECOVERED
"""The last window, which the controls send again, begins with this request after the shift."""
LINE_EVERY = 24
"""Requests per printed line."""
NUM_TIMED = 32
"""Requests of the last window that are timed in every arm. The others are only counted."""
STREAMS_UNTIMED = 16
SECONDS_TO_REPORT = 2.0
"""By then replicas have reported what they served."""
NUM_MORE_COMPARED = 16
"""Answers from the time of shift and swaps that are compared, besides those of the last window."""
MAX_RECORDS = 100_000


@dataclass(slots=True)
class Story:
    """What the run has seen so far."""

    home: list[Answer] = field(default_factory=list)
    shifted: list[Answer] = field(default_factory=list)
    adapted: list[Answer] = field(default_factory=list)
    static: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)
    static_untimed: list[Answer] = field(default_factory=list)
    plain_untimed: list[Answer] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the timed requests, by arm."""
    swaps: list[SwapReport] = field(default_factory=list)
    windows: list[SpecWindow] = field(default_factory=list)
    drafts: list[DraftView] = field(default_factory=list)
    """Every release, as the control port describes it."""
    num_compared: int = 0
    num_different: int = 0
    version: int = 0


async def play(service: Service, screen: Screen) -> Story:
    """Start the service and an engine without speculation, then send both their traffic."""
    story = Story()
    service.launch()
    assert service.engines is not None
    plain = service.engines.start_plain("plain")
    service.wait()
    plain_url = service.engines.wait(plain)
    screen.say(f"dashboard: {service.control_url}/dashboard (while this runs)")
    await _live_traffic(service, screen, story)
    await _controls(service, plain_url, screen, story)
    return story


async def _live_traffic(service: Service, screen: Screen, story: Story) -> None:
    """Home traffic, then the shift. The service does what it always does."""
    registry = Registry(service.redis_url, service.config.deployment)
    model = service.config.serving.served_model_name
    for title, domain, count, answers in (
        (f"home traffic ({HOME})", HOME, NUM_HOME, story.home),
        (f"the traffic shifts ({SHIFTED})", SHIFTED, NUM_SHIFTED, story.shifted),
    ):
        screen.title(title)

        def on_answer(answer: Answer, answers: list[Answer] = answers) -> None:
            answers.append(answer)
            if len(answers) % LINE_EVERY == 0:
                _read_swaps(registry, story)
                screen.line(len(answers), answers[-LINE_EVERY:], story.swaps)

        answers[:] = await drive(
            service.url,
            model,
            _prompts(domain, count),
            streams=STREAMS,
            api_key=service.config.serving.api_key,
            on_answer=on_answer,
        )
    _read_swaps(registry, story)
    registry.close()


def _prompts(domain: str, count: int) -> list[str]:
    return [request.prompt for request in requests(domain, count, SEED)]


def _read_swaps(registry: Registry, story: Story) -> None:
    with suppress(OSDError):  # then those read before stay
        records = registry.read("0", MAX_RECORDS)
        story.swaps = [record for _, record in records if isinstance(record, SwapReport)]


async def _controls(service: Service, plain_url: str, screen: Screen, story: Story) -> None:
    """Pause training, time the arms on the requests of the last window, and compare answers."""
    screen.title("controls: training paused, the last requests again")
    client = Client(service.control_url, token=service.token)
    client.admin("pause")
    await asyncio.sleep(2)  # a round in flight ends
    story.version = client.get("/osd/status")["version"]
    story.drafts = client.parsed(client.get("/osd/drafts"), list[DraftView])
    await _time_arms(service, plain_url, client, story)
    screen.say(
        "comparing answers given across the shift and the swaps with those of the engine without "
        "speculation"
    )
    await _serve_version(client, service.plan.release.version)
    await _compare_answers(service, plain_url, story)
    await asyncio.sleep(SECONDS_TO_REPORT)
    _read_windows(service, story)


async def _time_arms(service: Service, plain_url: str, client: Client, story: Story) -> None:
    """Adapted draft, frozen first draft and no speculation, in turns and back again."""
    prompts, half = _prompts(SHIFTED, NUM_SHIFTED), NUM_TIMED // 2
    versions = {"adapted": story.version, "static": service.plan.release.version}
    for start, arms in (
        (FIRST_CONTROL, ("adapted", "static", "plain")),
        (FIRST_CONTROL + half, ("plain", "static", "adapted")),
    ):
        for arm in arms:
            if arm != "plain":
                await _serve_version(client, versions[arm])
            url = plain_url if arm == "plain" else service.url
            clock = time.perf_counter()
            answers = await _ask(service, url, prompts[start : start + half], STREAMS)
            story.seconds[arm] = story.seconds.get(arm, 0.0) + time.perf_counter() - clock
            getattr(story, arm).extend(answers)


async def _compare_answers(service: Service, plain_url: str, story: Story) -> None:
    """Send the untimed requests to both engines, and compare every answer there is with that of the
    engine without speculation."""
    prompts = _prompts(SHIFTED, NUM_SHIFTED)
    untimed = prompts[FIRST_CONTROL + NUM_TIMED :]
    others = list(range(0, FIRST_CONTROL, max(1, FIRST_CONTROL // NUM_MORE_COMPARED)))
    asked_plain = untimed + [prompts[i] for i in others]
    story.static_untimed, answers = await asyncio.gather(
        _ask(service, service.url, untimed, STREAMS_UNTIMED),
        _ask(service, plain_url, asked_plain, STREAMS_UNTIMED),
    )
    story.plain_untimed, again = answers[: len(untimed)], answers[len(untimed) :]
    live = [story.shifted[i] for i in others] + story.shifted[FIRST_CONTROL:]
    _compare(story, live, [*again, *story.plain, *story.plain_untimed])
    _compare(story, story.adapted, story.plain)
    _compare(story, story.static, story.plain)
    _compare(story, story.static_untimed, story.plain_untimed)


async def _ask(service: Service, url: str, prompts: Sequence[str], streams: int) -> list[Answer]:
    serving = service.config.serving
    return await drive(
        url, serving.served_model_name, prompts, streams=streams, api_key=serving.api_key
    )


def _read_windows(service: Service, story: Story) -> None:
    registry = Registry(service.redis_url, service.config.deployment)
    with suppress(OSDError):  # then the report lacks only α
        records = registry.read("0", MAX_RECORDS)
        story.windows = [record for _, record in records if isinstance(record, SpecWindow)]
    registry.close()


async def _serve_version(client: Client, version: int) -> None:
    """Pin a version and wait until every replica serves it."""
    client.admin("pin", version=version)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        replicas = client.get("/osd/status")["replicas"]
        if replicas and all(r["version"] == version for r in replicas):
            return
        await asyncio.sleep(0.2)
    raise OSDError(f"no replica served v{version} within 60 s")


def _compare(story: Story, given: Sequence[Answer], plain: Sequence[Answer]) -> None:
    both = [(a, b) for a, b in zip(given, plain, strict=True) if a.ok and b.ok]
    story.num_compared += len(both)
    story.num_different += sum(a.token_ids != b.token_ids for a, b in both)
