"""A swap on several ranks: whatever fails on one of them, all end at one version.

The ranks here are swappers in this process, each with a part of the draft.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.records import DraftRelease, RankReport, StagingReport, WorkerReport, encode
from serving.swap.proof import EVERY_RANK, SwapProof, columns
from serving.swap.ranks import ASLEEP, SECONDS_TO_STAGE, Ranks
from serving.swap.swap import DraftSwapper
from tests.support.draft_releases import written
from tests.support.ranks import answer, ranks_of

NORM, MATRIX = "model.norm.weight", "model.layers.0.q_proj.weight"
NUM_RANKS = 3
Part = Mapping[str, torch.Tensor]


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {
        NORM: torch.arange(4.0) + version,
        MATRIX: torch.arange(24.0).reshape(6, 4) + version,
    }


class Rank:
    """Two rows of the matrix and a copy of the vector. `fails` names what raises, each as often as
    it stands there; `loses` is a tensor that does not arrive with the next weights."""

    def __init__(self, rank: int, fails: list[str]) -> None:
        self.rank, self.fails, self.loses = rank, fails, ""
        self.live = self.kept = self.part(tensors(1))

    def part(self, tensors: Part) -> Part:
        return {NORM: tensors[NORM], MATRIX: tensors[MATRIX].chunk(NUM_RANKS)[self.rank]}

    def build(self, tensors: Part) -> Part:
        self._may_fail("build")
        return self.part(tensors)

    def put(self, weights: Part) -> None:
        lost, self.loses = self.loses, ""
        self.live = {name: (self.live if name == lost else weights)[name] for name in weights}
        self._may_fail("put")

    def keep(self, weights: Part) -> None:
        self._may_fail("keep")
        self.kept = weights

    def put_back(self) -> None:
        self._may_fail("put_back")
        self.live = self.kept

    def read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._may_fail("read_back")
        yield EVERY_RANK, self.live[NORM]
        yield f"rank {self.rank}", self.live[MATRIX][:, columns(4)]

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            self.fails.remove(what)
            raise MemoryError(f"no room to {what}")


class World:
    """Three ranks that serve the first of four releases."""

    def __init__(self, path: Path, **fails: list[str]) -> None:
        self.releases = {
            version: written(path / f"v{version}", tensors(version), version=version)
            for version in range(1, 5)
        }
        self.parts = [Rank(rank, fails.get(f"rank_{rank}", [])) for rank in range(NUM_RANKS)]
        self.swappers = [
            DraftSwapper(
                self.releases[1],
                part,
                SwapProof(part.read_back, torch.float32),
                lambda work: work(),
            )
            for part in self.parts
        ]
        self.ranks = ranks_of(*self.swappers)

    def swap(self, version: int) -> str:
        """Returns what was wrong."""
        staged, committed = asyncio.run(self.ranks.swap(self.releases[version]))
        assert not staged.error or staged.error == committed.error
        assert committed.proved == (not committed.error and not self.ranks.unproved)
        is_whole = all(swapper.is_whole for swapper in self.swappers)
        assert staged.error or committed.is_lost != is_whole
        return committed.error

    def serves(self, version: int) -> bool:
        """Whether every rank has its part of this draft, and says so."""
        expected = [part.part(tensors(version)) for part in self.parts]
        return (
            all(
                torch.equal(part.live[name], own[name])
                for part, own in zip(self.parts, expected, strict=True)
                for name in own
            )
            and [(s.version, s.is_whole) for s in self.swappers] == [(version, True)] * NUM_RANKS
        )


def test_all_ranks_go_from_version_to_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.ranks.unproved == "" and world.serves(1)
    for version in (3, 2, 4):
        assert world.swap(version) == "" and world.serves(version)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("build", "rank {}: v3: MemoryError: no room to build"),
        ("put", "v3: loading failed, the previous draft was restored: rank {}: MemoryError: "),
        ("read_back", "v3: loading failed, the previous draft was restored: rank {}: MemoryError"),
    ],
)
def test_where_one_rank_fails_all_keep_the_draft_they_had(
    tmp_path: Path, rank: int, step: str, error: str
) -> None:
    world = World(tmp_path)
    assert world.swap(2) == ""
    world.parts[rank].fails.append(step)
    assert world.swap(3).startswith(error.format(rank)) and world.serves(2)
    assert world.swap(3) == "" and world.serves(3)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("lost", [NORM, MATRIX])
def test_where_one_rank_keeps_a_stale_tensor_all_go_back(
    tmp_path: Path, rank: int, lost: str
) -> None:
    """It says nothing of it: the digests do not add up, or copies differ."""
    world = World(tmp_path)
    world.parts[rank].loses = lost
    why = "the copies on every rank differ" if lost == NORM else "the engine holds other weights"
    assert why in world.swap(2) and world.serves(1)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_where_one_rank_cannot_be_restored_no_rank_serves_a_version_until_the_next_swap(
    tmp_path: Path, rank: int
) -> None:
    world = World(tmp_path)
    world.parts[rank].fails = ["put", "put_back"]
    assert world.swap(2) == (
        f"v2: rank {rank}: MemoryError: no room to put; and the previous draft could not be "
        f"restored: rank {rank}: MemoryError: no room to put_back; restart this replica"
    )
    assert [(s.version, s.is_whole) for s in world.swappers] == [(1, False)] * NUM_RANKS
    assert world.swap(3) == "" and world.serves(3)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_that_cannot_confirm_is_asked_once_more(tmp_path: Path, rank: int) -> None:
    world = World(tmp_path)
    world.parts[rank].fails = ["keep"]
    assert world.swap(2) == "" and world.serves(2)
    world.parts[1].fails = ["put"]
    assert "previous draft was restored" in world.swap(3) and world.serves(2)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_where_one_rank_never_confirms_no_rank_serves_a_version_until_the_next_swap(
    tmp_path: Path, rank: int
) -> None:
    world = World(tmp_path)
    world.parts[rank].fails = ["keep"] * 2
    assert world.swap(2) == (
        "v2: it is live, but could not be kept for the next swap to return to: "
        f"rank {rank}: MemoryError: no room to keep; restart this replica"
    )
    assert not any(swapper.is_whole for swapper in world.swappers)
    assert world.swap(3) == "" and world.serves(3)


@pytest.mark.parametrize("is_proved", [True, False])
def test_ranks_that_kept_different_versions_are_not_said_to_be_restored(
    tmp_path: Path, is_proved: bool
) -> None:
    world = World(tmp_path)
    world.ranks.unproved = "" if is_proved else "nothing reads it back"
    world.parts[1].fails = ["keep"] * 2
    assert "could not be kept" in world.swap(2)
    world.parts[0].fails = ["put"]
    assert "could not be restored: ranks have kept different versions" in world.swap(3)
    assert not any(swapper.is_whole for swapper in world.swappers)
    assert world.swap(4) == "" and world.serves(4)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_draft_restored_on_all_ranks_but_one_is_said_to_be_useless(
    tmp_path: Path, rank: int
) -> None:
    world = World(tmp_path)
    world.parts[rank].kept = world.parts[rank].part(tensors(4))
    world.parts[0].fails = ["put"]
    assert "could not be restored: the " in world.swap(2)
    assert not any(swapper.is_whole for swapper in world.swappers)


def test_a_restored_draft_that_one_rank_cannot_read_is_taken_at_its_word(tmp_path: Path) -> None:
    """Reading takes memory, and there may be none left."""
    world = World(tmp_path)
    world.parts[1].fails = ["read_back", "read_back"]
    assert "previous draft was restored: rank 1: MemoryError" in world.swap(2)
    assert world.serves(1)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_rank_that_cannot_be_read_back_leaves_the_engine_unproved(
    tmp_path: Path, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, **{f"rank_{rank}": ["read_back"]})
    assert world.ranks.unproved == f"rank {rank}: MemoryError: no room to read_back"
    assert world.swap(2) == "" and world.serves(2)
    said = f"swaps are not proved in this engine: {world.ranks.unproved}"
    assert [record.message for record in caplog.records] == [said]


def test_ranks_that_hold_another_form_of_the_draft_are_not_proved(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.parts[2].live = world.parts[1].live
    ranks = ranks_of(*world.swappers)
    assert ranks.unproved == "its layers hold the first draft in a form of their own"


class Slow:
    """Two ranks, of which the second takes its time to stage. Calls are noted."""

    def __init__(self, world: World, looks: int) -> None:
        self.world, self.num_looks, self.now, self.calls = world, looks, 0.0, list[str]()
        self.ranks = Ranks(self.call, lambda: self.now)

    async def call(self, method: str, *arguments: Any) -> list[str]:
        self.calls.append(method)
        answers = [answer(swapper, method, arguments) for swapper in self.world.swappers]
        if method == "osd_staging" and self.calls.count(method) <= self.num_looks:
            self.now += SECONDS_TO_STAGE / 11
            answers[1] = encode(StagingReport(version=2)).decode()
        return answers

    def swap(self, release: DraftRelease) -> str:
        num = itertools.count(1)

        async def meanwhile() -> None:
            self.num_meanwhile = next(num)

        return asyncio.run(self.ranks.swap(release, meanwhile))[1].error


def test_the_slowest_rank_is_waited_for(tmp_path: Path) -> None:
    slow = Slow(World(tmp_path), looks=5)
    assert slow.swap(slow.world.releases[2]) == "" and slow.world.serves(2)
    assert slow.calls == ["osd_stage", *["osd_staging"] * 6, "osd_put", "osd_confirm"]
    assert slow.num_meanwhile == 5


def test_a_rank_that_stages_for_ten_minutes_is_given_up_and_all_drop_the_draft(
    tmp_path: Path,
) -> None:
    slow = Slow(World(tmp_path), looks=100)
    assert slow.swap(slow.world.releases[2]) == "staging took too long"
    assert slow.calls == ["osd_stage", *["osd_staging"] * 11, "osd_drop"]
    assert {swapper.staging.error for swapper in slow.world.swappers} == {"nothing staged"}
    assert slow.world.serves(1)


def test_where_one_rank_cannot_stage_the_others_drop_what_they_built(tmp_path: Path) -> None:
    world = World(tmp_path, rank_1=["build"])
    assert world.swap(2) == "rank 1: v2: MemoryError: no room to build"
    assert {swapper.staging.error for swapper in world.swappers} == {"nothing staged"}


def test_a_staging_that_fails_moves_no_rank_while_they_have_kept_different_versions(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.parts[1].fails = ["keep"] * 2
    assert "could not be kept" in world.swap(2)
    live = [part.live for part in world.parts]
    world.parts[2].fails = ["build"]
    assert "no room to build" in world.swap(3)
    assert all(part.live is own for part, own in zip(world.parts, live, strict=True))


def test_what_goes_on_meanwhile_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(World(tmp_path), looks=2)

    async def meanwhile() -> None:
        raise RuntimeError("the counters cannot be read")

    staged, committed = asyncio.run(slow.ranks.swap(slow.world.releases[2], meanwhile))
    assert (staged.error, committed.error) == ("", "") and slow.world.serves(2)
    assert caplog.messages == ["what goes on during a staging failed"] * 2


def test_a_rank_that_answers_with_an_error_has_failed(tmp_path: Path) -> None:
    """As a worker answers where it would have raised."""
    world = World(tmp_path)

    async def call(method: str, *arguments: Any) -> list[str]:
        answers = [answer(swapper, method, arguments) for swapper in world.swappers]
        if method == "osd_put":
            answers[2] = '{"error":"OSError: gone"}'
        return answers

    _, committed = asyncio.run(Ranks(call).swap(world.releases[2]))
    assert committed.error.endswith("previous draft was restored: rank 2: OSError: gone")
    assert world.serves(1)


def test_what_keeps_a_rank_from_beginning_to_stage_is_said(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def call(method: str, *arguments: Any) -> list[str]:
        if method == "osd_stage":
            return ["{}", '{"error":"DecodeError: no such field"}', "{}"]
        return [answer(swapper, method, arguments) for swapper in world.swappers]

    staged, committed = asyncio.run(Ranks(call).swap(world.releases[2]))
    assert staged.error == committed.error == "rank 1: DecodeError: no such field"
    assert {swapper.staging.error for swapper in world.swappers} == {"nothing staged"}
    assert world.serves(1)


def test_an_engine_that_fell_asleep_while_a_draft_was_staged_keeps_the_one_it_has(
    tmp_path: Path,
) -> None:
    """Its memory is not mapped: to write there would end it."""
    world, calls = World(tmp_path), list[str]()

    async def call(method: str, *arguments: Any) -> list[str]:
        calls.append(method)
        return [answer(swapper, method, arguments) for swapper in world.swappers]

    async def is_asleep() -> bool:
        return "osd_staging" in calls

    _, committed = asyncio.run(Ranks(call, is_asleep=is_asleep).swap(world.releases[2]))
    assert committed.error == ASLEEP and "osd_put" not in calls
    assert {swapper.staging.error for swapper in world.swappers} == {"nothing staged"}
    assert world.serves(1)


def test_an_engine_that_does_not_say_whether_it_sleeps_serves_on_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What asks goes on: it sends the heartbeat, too."""
    answers: list[Any] = [AttributeError("is_sleeping"), RuntimeError("mixed"), True, False]

    async def call(method: str, *arguments: Any) -> list[str]:
        raise AssertionError("no rank is asked for anything")

    async def is_asleep() -> bool:
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return bool(found)

    ranks = Ranks(call, is_asleep=is_asleep)
    assert [asyncio.run(ranks.can_swap()) for _ in range(4)] == [False, False, False, True]
    assert caplog.text.count("swaps wait: the engine does not say whether it sleeps") == 1


def test_counters_are_the_first_ranks(tmp_path: Path) -> None:
    counted = WorkerReport(num_traces=4)

    async def call(method: str, *arguments: Any) -> list[str]:
        assert (method, arguments) == ("osd_report", ("replica-0", "default"))
        return [encode(counted).decode(), encode(WorkerReport(num_traces=9)).decode()]

    async def failing(method: str, *arguments: Any) -> list[str]:
        return ['{"error":"KeyError: 7"}', "{}"]

    assert asyncio.run(Ranks(call).report("replica-0", "default")) == counted
    with pytest.raises(RuntimeError, match="counters cannot be read: KeyError: 7"):
        asyncio.run(Ranks(failing).report("replica-0", "default"))


@pytest.mark.parametrize("slow", range(NUM_RANKS))
def test_a_swap_takes_as_long_as_the_slowest_rank(tmp_path: Path, slow: int) -> None:
    took = {"osd_staging": 5.0, "osd_put": 0.25, "osd_confirm": 0.5}

    async def call(method: str, *arguments: Any) -> list[str]:
        kind = StagingReport if method == "osd_staging" else RankReport
        done = {"done": True} if method == "osd_staging" else {}
        seconds = [took.get(method, 0.0) * (rank == slow) for rank in range(NUM_RANKS)]
        return [encode(kind(version=2, seconds=each, **done)).decode() for each in seconds]

    release = World(tmp_path).releases[2]
    staged, committed = asyncio.run(Ranks(call).swap(release))
    assert (staged.seconds, committed.pause_s) == (5.0, 0.75)
