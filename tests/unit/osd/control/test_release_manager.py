"""What each change of the serving draft does to the disk, the wish and the feed."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osd.config.schema import Config
from osd.control.release_manager import ReleaseManager
from osd.errors import AwayError, ReleaseError
from osd.exchange.registry import FeedRecord
from osd.observe.status import presentable
from osd.records import Event, MetricPoint, RoundOutcome
from osd.releases.store import ReleaseStore
from tests.support.clocks import HandClock
from tests.unit.osd.control.test_controller import TARGET, MemoryRegistry, make_outcome, no_gain
from tests.unit.osd.releases.test_store import make_model, publish_line, versions

ELSEWHERE = "/of/the/trainer"
"""A candidate's path on another machine."""


class Desk:
    """Drafts v1 to v3 on disk, v3 serving; and what is said about them."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.model = make_model(directory / "candidate")
        self.store = ReleaseStore(directory / "releases")
        self.v1, self.v2, self.v3 = publish_line(self.store, self.model, 3)
        self.registry, self.clock = MemoryRegistry(), HandClock()
        self.said: list[FeedRecord] = []
        given = {"data_dir": str(directory), "releases": {"keep": 2}}
        config = Config.model_validate(given | settings)
        self.collected: list[str] = []
        self.collecting = asyncio.Event()
        self.collecting.set()
        self.is_cut_off = False
        self.drafts = ReleaseManager(
            config, self.registry, self.store, TARGET, self.tell, self.clock, self.collect
        )

    async def collect(self, outcome: RoundOutcome) -> str:
        self.collected.append(outcome.path)
        await self.collecting.wait()
        if self.is_cut_off:
            raise AwayError("the service's part 'trainer' does not answer")
        return str(self.model) if outcome.path == ELSEWHERE else outcome.path

    async def tell(self, *records: FeedRecord) -> None:
        self.said += records

    async def conclude(
        self, outcome: RoundOutcome, *, is_paused: bool = False, serving: tuple[int, ...] = ()
    ) -> None:
        self.drafts.is_paused = is_paused
        await self.drafts.conclude(outcome, {*serving})

    def event(self, kind: str, text: str, version: int = 0) -> Event:
        return Event(at=self.clock.now, kind=kind, text=text, version=version)

    def wanted(self) -> int | None:
        release = self.registry.wishes.get("default")
        return None if release is None else release.version


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


Change = Callable[[Desk], Awaitable[object]]


# By hand


@pytest.mark.parametrize(
    ("change", "serves", "kind", "text", "version"),
    [
        (lambda desk: desk.drafts.promote(2), 2, "promoted", "v2 by hand", 2),
        (lambda desk: desk.drafts.pin(1), 1, "pinned", "v1 serves until unpinned", 1),
        (lambda desk: desk.drafts.rollback(), 2, "rolled_back", "v3 -> v2: by hand", 2),
        (lambda desk: desk.drafts.unpin(), None, "unpinned", "newer drafts may serve again", 0),
        (lambda desk: desk.drafts.keep(1), None, "kept", "v1 is never pruned", 1),
    ],
)
async def test_a_change_by_hand_is_made_wanted_and_said(
    desk: Desk, change: Change, serves: int | None, kind: str, text: str, version: int
) -> None:
    """`serves` None: it changes nothing that serves, so there is nothing to want, nor to judge
    anew."""
    await change(desk)
    current = await desk.drafts.current()
    assert current is not None and current.version == (serves or 3)
    assert desk.wanted() == serves
    assert desk.drafts.changed_at == (desk.clock.monotonic() if serves else -math.inf)
    event, *points = desk.said
    assert event == desk.event(kind, text, version)
    rollback = MetricPoint(
        at=desk.clock.now, name="osd_rollback_total", value=1, labels={"reason": "by_hand"}
    )
    assert points == ([rollback] if kind == "rolled_back" else [])
    assert desk.store.bad() == {}, "nothing done by hand condemns a draft"


async def test_what_cannot_be_done_is_raised_and_changes_and_says_nothing(desk: Desk) -> None:
    desk.store.mark_bad(3, "disappointed")
    for change in (
        desk.drafts.promote(3),
        desk.drafts.pin(3),
        desk.drafts.promote(9),
        desk.drafts.keep(9),
    ):
        with pytest.raises(ReleaseError):
            await change
    assert (desk.said, desk.wanted(), desk.drafts.changed_at) == ([], None, -math.inf)


@pytest.mark.parametrize("change", [ReleaseManager.promote, ReleaseManager.pin])
async def test_a_draft_of_another_target_is_not_told_to_serve(
    desk: Desk, change: Callable[[ReleaseManager, int], Awaitable[object]]
) -> None:
    """No engine would take it, and a pin or a trial of this target's would end for it."""
    desk.store.publish(desk.model, parent=0, target_id="another")
    desk.store.pin(2)
    with pytest.raises(ReleaseError, match=r"v4: is of another target .*there are: v1, v2, v3"):
        await change(desk.drafts, 4)
    assert (desk.said, desk.wanted(), desk.drafts.changed_at) == ([], None, -math.inf)
    assert await desk.drafts.pinned() == 2


@pytest.mark.parametrize(
    "change",
    [ReleaseManager.rollback, lambda drafts: drafts.promote(2), lambda drafts: drafts.pin(2)],
)
async def test_without_redis_a_change_is_made_and_wanted_later(
    desk: Desk,
    change: Callable[[ReleaseManager], Awaitable[object]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk.registry.is_away = True
    await change(desk.drafts)
    current = await desk.drafts.current()
    assert current is not None and current.version == 2
    assert "replicas will hear of v2 later: Redis at redis://nowhere cannot be used" in caplog.text
    desk.registry.is_away = False
    await desk.drafts.restore_wanted()
    assert desk.wanted() == 2


async def test_what_is_wanted_is_written_only_where_it_differs_from_the_disk(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="osd.control.release_manager"):
        for wish in (None, desk.v1, replace(desk.v3, path="/elsewhere")):
            desk.registry.wishes = {} if wish is None else {"default": wish}
            await desk.drafts.restore_wanted()
            assert desk.registry.wishes == {"default": desk.v3}
            await desk.drafts.restore_wanted()
    assert caplog.messages == ["wanted draft is v3"] * 3


async def test_what_is_wanted_is_left_alone_while_a_change_is_under_way(desk: Desk) -> None:
    async with desk.drafts._lock:
        await asyncio.wait_for(desk.drafts.restore_wanted(), 10)
    assert desk.wanted() is None


async def test_what_a_round_starts_from_and_its_line(desk: Desk) -> None:
    assert await desk.drafts.base() == (desk.v3, 0)
    await desk.drafts.rollback()
    assert await desk.drafts.base() == (desk.v2, 1)
    shutil.rmtree(desk.store.root)
    desk.store.root.mkdir()
    assert await desk.drafts.base() is None


# Rounds


async def test_a_better_candidate_is_published_wanted_and_said(desk: Desk) -> None:
    outcome = make_outcome(str(desk.model), 3)
    desk.clock.move(7)
    await desk.conclude(outcome, serving=(2,))
    release = desk.store.get(4)
    assert (release.parent, release.target_id, release.outcome) == (3, TARGET, outcome)
    assert desk.registry.wishes == {"default": release}
    assert desk.drafts.changed_at == desk.clock.monotonic()
    assert versions(desk.store) == [1, 2, 3, 4], "v2 serves still in one replica"
    text = "v4: held-out α 0.40 -> 0.70 on 40 requests, at least +0.250"
    at = desk.clock.now
    assert desk.said == [
        outcome,
        desk.event("published", text, 4),
        MetricPoint(at=at, name="osd_round_total", value=1, labels={"outcome": "published"}),
        MetricPoint(at=at, name="osd_round_rows_total", value=900, labels={"kind": "trainable"}),
        MetricPoint(at=at, name="osd_round_rows_total", value=7, labels={"kind": "contradicting"}),
    ]
    await desk.conclude(make_outcome(str(desk.model), 4))
    assert versions(desk.store) == [1, 4, 5], "releases.keep is 2; the first is always kept"


@pytest.mark.parametrize(
    ("fields", "is_paused", "kind", "text", "label"),
    [
        (
            {"path": "/nowhere"},
            False,
            "publish_failed",
            "/nowhere: no config.json; a draft is",
            "failed",
        ),
        ({"path": ""}, True, "refused", "paused while it was trained", "refused"),
        (
            {"base_version": 2},
            False,
            "refused",
            "base is no longer current: trained from v2, v3 serves",
            "refused",
        ),
        (
            {"discarded": "loss rose", "eval": None, "path": ""},
            True,
            "discarded",
            "round discarded: loss rose",
            "discarded",
        ),
        (
            {"loss_first": math.inf, "loss_last": math.nan},
            False,
            "refused",
            "not finite: the loss or the measured acceptance is NaN or infinite",
            "refused",
        ),
        (
            {"eval": None, "num_contradicting": 300},
            False,
            "refused",
            "not judged: fewer than 8",
            "refused",
        ),
    ],
)
async def test_another_candidate_is_said_and_changes_nothing(
    desk: Desk, fields: dict[str, object], is_paused: bool, kind: str, text: str, label: str
) -> None:
    outcome = replace(make_outcome(str(desk.model), 3), **fields)  # type: ignore[arg-type]
    await desk.conclude(outcome, is_paused=is_paused)
    told, event, counted, *_ = desk.said
    assert told == presentable(outcome)
    assert isinstance(event, Event) and (event.kind, event.version) == (kind, outcome.base_version)
    assert event.text.startswith(text)
    contradicts = "; 25 % of the new rows contradict the text and were left out"
    assert (contradicts in event.text) == ("num_contradicting" in fields)
    assert isinstance(counted, MetricPoint) and counted.labels == {"outcome": label}
    assert (versions(desk.store), desk.wanted(), desk.drafts.changed_at) == (
        [1, 2, 3],
        None,
        -math.inf,
    )


@pytest.mark.parametrize(
    ("num_ranks", "end"), [(1, "=probabilistic"), (2, "not an EAGLE-3 head over several ranks)")]
)
async def test_a_rounds_event_says_what_sampled_drafts_would_bring(
    tmp_path: Path, num_ranks: int, end: str
) -> None:
    desk = Desk(tmp_path, serving={"vllm": {"tensor_parallel_size": num_ranks}})
    outcome = make_outcome(str(desk.model), 3)
    assert outcome.eval is not None
    outcome = replace(outcome, eval=replace(outcome.eval, sampled=(0.34, 0.64)))
    await desk.conclude(outcome, is_paused=False)
    (event,) = (record for record in desk.said if isinstance(record, Event))
    assert "would be 0.64 with speculation.draft_sample_method=probabilistic" in event.text
    assert event.text.endswith(end)


async def test_a_pause_while_a_candidate_waits_for_its_turn_refuses_it(desk: Desk) -> None:
    paused = asyncio.create_task(desk.drafts.set_paused(True))
    published = asyncio.create_task(desk.drafts.conclude(make_outcome(str(desk.model), 3), set()))
    await asyncio.gather(paused, published)
    assert [record.kind for record in desk.said if isinstance(record, Event)] == ["refused"]
    assert versions(desk.store) == [1, 2, 3] and desk.store.paused()


async def test_a_pause_is_answered_when_what_was_being_published_is(desk: Desk) -> None:
    """From then on nothing is."""
    published = asyncio.create_task(desk.drafts.conclude(make_outcome(str(desk.model), 3), set()))
    while not desk.drafts._lock.locked():
        await asyncio.sleep(0)
    await desk.drafts.set_paused(True)
    assert desk.wanted() == 4 and desk.store.paused()
    await published


async def test_a_worse_candidate_is_refused_for_that_also_while_paused(desk: Desk) -> None:
    await desk.conclude(no_gain(desk.v3), is_paused=True)
    assert isinstance(desk.said[1], Event) and desk.said[1].text.startswith("no gain")


async def test_a_pinned_draft_refuses_every_candidate(desk: Desk) -> None:
    await desk.drafts.pin(3)
    await desk.conclude(make_outcome(str(desk.model), 3))
    assert desk.event("refused", "v3 is pinned", 3) in desk.said


async def test_a_round_whose_base_is_gone_is_refused(desk: Desk) -> None:
    shutil.rmtree(desk.store.root)
    desk.store.root.mkdir()
    await desk.conclude(make_outcome(str(desk.model), 3))
    assert desk.event("refused", "the draft it was trained from is gone", 3) in desk.said


async def test_what_cannot_be_pruned_keeps_nothing_from_serving(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(desk.store.root / ".tmp-prune-2")
    await desk.conclude(make_outcome(str(desk.model), 3))
    await desk.conclude(make_outcome(str(desk.model), 4))
    assert desk.wanted() == 5
    assert "old releases were not removed: releases cannot be stored" in caplog.text
    assert [record.kind for record in desk.said if isinstance(record, Event)] == ["published"] * 2


# From another machine


async def test_a_candidate_comes_to_this_machine_once_the_gate_let_it_through(desk: Desk) -> None:
    await desk.conclude(no_gain(desk.v3))
    await desk.conclude(make_outcome(ELSEWHERE, 3), is_paused=True)
    assert desk.collected == []
    await desk.conclude(make_outcome(ELSEWHERE, 3))
    assert desk.collected == [ELSEWHERE] and desk.wanted() == 4


async def test_a_candidate_that_does_not_come_is_not_published(desk: Desk) -> None:
    desk.is_cut_off = True
    await desk.conclude(make_outcome(ELSEWHERE, 3))
    text = "the service's part 'trainer' does not answer"
    assert desk.event("publish_failed", text, 3) in desk.said
    assert desk.store.current(TARGET) == desk.v3


async def test_drafts_are_changed_by_hand_while_a_candidate_is_on_its_way(desk: Desk) -> None:
    desk.collecting.clear()
    concluding = asyncio.create_task(desk.conclude(make_outcome(ELSEWHERE, 3)))
    while not desk.collected:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(desk.drafts.pin(2), 5)
    desk.collecting.set()
    await concluding
    assert desk.wanted() == 2
    assert [record.kind for record in desk.said if isinstance(record, Event)] == [
        "pinned",
        "refused",
    ]


# Taken back


async def test_a_draft_taken_back_is_marked_and_never_offered_again(desk: Desk) -> None:
    assert await desk.drafts.take_back(desk.v3, "α 0.3, 0.7 was measured")
    assert desk.store.bad() == {3: "α 0.3, 0.7 was measured"}
    assert (desk.wanted(), desk.drafts.changed_at) == (2, desk.clock.monotonic())
    assert desk.said == [
        desk.event("rolled_back", "v3 -> v2: α 0.3, 0.7 was measured", 2),
        MetricPoint(
            at=desk.clock.now, name="osd_rollback_total", value=1, labels={"reason": "disappointed"}
        ),
    ]


async def test_only_what_serves_and_is_not_pinned_is_taken_back(desk: Desk) -> None:
    assert not await desk.drafts.take_back(desk.v2, "α fell")
    await desk.drafts.pin(3)
    assert not await desk.drafts.take_back(desk.v3, "α fell")
    assert desk.store.bad() == {}
    assert [record.kind for record in desk.said if isinstance(record, Event)] == ["pinned"]


async def test_where_there_is_nothing_before_it_a_draft_stays_and_it_is_said(desk: Desk) -> None:
    await desk.drafts.promote(1)
    assert await desk.drafts.previous() is None
    assert not await desk.drafts.take_back(desk.v1, "α fell")
    text = "v1 should go, but draft v1: there is no earlier release to go back to"
    assert desk.said[1:] == [desk.event("rollback_failed", text, 1)]
    assert desk.store.bad() == {} and desk.wanted() == 1
