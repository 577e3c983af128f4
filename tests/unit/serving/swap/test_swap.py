"""What may become the live draft, and what is served when a swap fails.

The draft here is no more than a name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from osd.errors import SwapError
from osd.records import DraftRelease, StagingReport
from serving.swap.proof import EVERY_RANK, SwapProof, of_release
from serving.swap.shape import DraftShape, read_release
from serving.swap.swap import DraftSwapper
from tests.support.draft_releases import CONFIG, written
from tests.support.ranks import ranks_of

NORM, MATRIX, MASK, IDS = (
    "model.norm.weight",
    "model.layers.0.q_proj.weight",
    "attention.bias",
    "attention.ids",
)
STEPS = "attention.steps"
Checkpoint = Mapping[str, torch.Tensor]


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {
        NORM: torch.arange(4.0) + version,
        MATRIX: torch.arange(8.0).reshape(2, 4) * version,
        MASK: torch.ones(2, 2, dtype=torch.bool),
        IDS: torch.arange(3, dtype=torch.uint8),
        STEPS: torch.arange(2),
    }


@dataclass
class Draft:
    """A live draft of plain tensors. `fails` names what raises, each as often as it stands
    there."""

    live: Checkpoint
    kept: Checkpoint
    fails: list[str] = field(default_factory=list)
    loses: str = ""
    """A tensor that does not arrive with the next weights, without an error."""

    def build(self, tensors: Checkpoint) -> Checkpoint:
        self._may_fail("build")
        return tensors

    def put(self, weights: Checkpoint) -> None:
        lost, self.loses = self.loses, ""
        self.live = {
            name: self.live[name] if name == lost else tensor for name, tensor in weights.items()
        }
        self._may_fail("put")

    def keep(self, weights: Checkpoint) -> None:
        self._may_fail("keep")
        self.kept = weights

    def put_back(self) -> None:
        self._may_fail("put_back")
        self.live = self.kept

    def read_back(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._may_fail("read_back")
        return ((EVERY_RANK, part) for part in of_release(self.live, torch.float32))

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            self.fails.remove(what)
            raise MemoryError(f"no room to {what}")


class World:
    """Releases 1 to 4 on disk, and a swapper that serves the first. `target` is what no swap may
    touch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.releases = {
            version: written(path / f"v{version}", tensors(version), version=version)
            for version in range(1, 5)
        }
        self.draft = Draft(tensors(1), tensors(1))
        self.target = torch.ones(3)
        self.waiting: list[Callable[[], None]] = []
        proof = SwapProof(self.draft.read_back, torch.float32, lambda: [self.target])
        self.swapper = DraftSwapper(self.releases[1], self.draft, proof, self.waiting.append)
        self.ranks = ranks_of(self.swapper)

    def stage(self, release: DraftRelease) -> str:
        """Staged to its end; returns what was wrong with it."""
        self.swapper.stage(release)
        self.waiting.pop()()
        return self.swapper.staging.error

    def swap(self, version: int) -> str:
        """Returns what was wrong."""
        assert self.stage(self.releases[version]) == ""
        return self.commit(version)

    def commit(self, version: int) -> str:
        """Returns what was wrong."""
        return asyncio.run(self.ranks.commit(version)).error

    def serves(self, version: int) -> bool:
        """Whether this is the live draft, and is said to be."""
        same = all(
            torch.equal(self.draft.live[name], tensor) for name, tensor in tensors(version).items()
        )
        return same and self.swapper.version == version and self.swapper.prove() == ""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def changed(name: str, at: int, value: float) -> dict[str, torch.Tensor]:
    made = tensors(2)
    made[name].view(-1)[at] = value
    return made


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {new if name == old else name: tensor for name, tensor in tensors(2).items()}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            {k: v for k, v in tensors(2).items() if k not in (NORM, MATRIX)},
            f"2 tensors are missing, first {MATRIX}",
        ),
        ({**tensors(2), "b": torch.ones(1), "a": torch.ones(1)}, "2 tensors are unknown, first a"),
        (renamed(NORM, "norm.weight"), f"1 tensors are missing, first {NORM}"),
        ({**tensors(2), MATRIX: torch.ones(4, 2)}, f"{MATRIX} has shape (4, 2), expected (2, 4)"),
        (
            {**tensors(2), MASK: torch.ones(4, dtype=torch.bool)},
            f"{MASK} has shape (4,), expected (2, 2)",
        ),
        (
            {**tensors(2), NORM: torch.ones(4, dtype=torch.int32)},
            f"{NORM} is torch.int32, expected floating point",
        ),
        (changed(MATRIX, 7, float("nan")), f"{MATRIX} holds NaN or infinite values"),
        (changed(MATRIX, 0, float("inf")), f"{MATRIX} holds NaN or infinite values"),
        (changed(NORM, 3, float("-inf")), f"{NORM} holds NaN or infinite values"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    world: World, made: dict[str, torch.Tensor], reason: str
) -> None:
    assert world.stage(written(world.path / "bad", made, version=2)) == f"v2: {reason}"
    assert_not_committed(world)


def assert_not_committed(world: World) -> None:
    assert world.commit(2).endswith("restored: v2 is not staged")
    assert world.serves(1)


def test_masks_may_hold_anything_and_numbers_any_precision(world: World) -> None:
    made = {
        name: tensor.to(torch.bfloat16) if name == MATRIX else tensor
        for name, tensor in tensors(2).items()
    }
    made[MASK], made[IDS] = torch.zeros(2, 2), torch.tensor([1.0, float("nan"), 2.0])
    made[STEPS] = torch.tensor([-5, 5], dtype=torch.int16)
    assert world.stage(written(world.path / "other", made, version=2)) == ""


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "rms_norm_eps",
        "layer_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rotary_pct",
        "use_parallel_residual",
        "max_position_embeddings",
    ],
)
def test_another_architecture_is_refused_by_the_key_that_differs(world: World, key: str) -> None:
    other = written(world.path / "bad", tensors(2), version=2, **{key: ["other"]})
    why = f"config.json has {key}=['other'], the engine runs {CONFIG.get(key)!r}"
    assert world.stage(other) == f"v2: {why}"
    assert_not_committed(world)


def test_other_entries_of_the_config_may_change(world: World) -> None:
    other = written(world.path / "other", tensors(2), version=2, transformers_version="9")
    assert world.stage(other) == ""


def test_a_draft_head_is_refused_before_its_tensors_are_read(world: World) -> None:
    head = written(
        world.path / "head",
        {"fc.weight": torch.ones(1)},
        version=2,
        architectures=["EagleLlamaForCausalLM"],
    )
    expected = (
        "it is a draft head (EagleLlamaForCausalLM), and of heads only EAGLE-3 heads of one Llama "
        "layer are served"
    )
    assert world.stage(head) == f"v2: {expected}"
    assert_not_committed(world)
    with pytest.raises(SwapError) as refused:
        DraftSwapper(head, world.draft)
    assert str(refused.value) == expected


def cut(release: DraftRelease) -> DraftRelease:
    """Damaged, and released like this."""
    file = Path(release.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    from osd.common.files import sha256

    return replace(release, sha256=sha256(file))


def without(name: str) -> Callable[[DraftRelease], DraftRelease]:
    def take_away(release: DraftRelease) -> DraftRelease:
        (Path(release.path) / name).unlink()
        return release

    return take_away


def with_a_broken_config(release: DraftRelease) -> DraftRelease:
    (Path(release.path) / "config.json").write_text("{")
    return release


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "v2: model.safetensors is damaged: "),
        (without("model.safetensors"), "v2: {path} cannot be read: "),
        (without("config.json"), "v2: {path} cannot be read: "),
        (with_a_broken_config, "v2: {path} cannot be read: "),
        (lambda release: replace(release, sha256="f" * 64), "v2: sha256 of model.safetensors is "),
    ],
)
def test_damaged_files_are_refused(
    world: World, damage: Callable[[DraftRelease], DraftRelease], reason: str
) -> None:
    release = world.releases[2]
    assert world.stage(damage(release)).startswith(reason.format(path=release.path))
    assert_not_committed(world)


def test_what_becomes_of_a_file_after_it_was_read_does_no_harm(world: World) -> None:
    """Cut short under a mapping, it would end the engine. Written over, other weights would serve
    than those whose digest was right."""
    release = world.releases[2]
    file = Path(release.path) / "model.safetensors"
    read = read_release(release, DraftShape.of(Path(world.releases[1].path)))
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(2).items())


def test_both_hashes_are_named(world: World) -> None:
    release = world.releases[2]
    error = world.stage(replace(release, sha256="0123456789abcdef" * 4))
    found = release.sha256[:12]
    assert error == f"v2: sha256 of model.safetensors is {found}, release.json says 0123456789ab"


def test_a_failed_swap_goes_back_to_the_last_good_draft_and_keeps_its_version(world: World) -> None:
    assert world.swap(2) == world.swap(3) == "" and world.serves(3)
    world.draft.fails = ["put"]
    expected = "v4: loading failed, the previous draft was restored: MemoryError: no room to put"
    assert world.swap(4) == expected and world.serves(3)
    assert world.swap(4) == "" and world.serves(4)


def test_weights_that_did_not_arrive_are_taken_back(world: World) -> None:
    assert world.swap(2) == ""
    world.draft.loses = NORM
    error = world.swap(3)
    assert error.startswith(
        "v3: loading failed, the previous draft was restored: the engine holds other weights"
    )
    assert world.serves(2)


def test_a_swap_that_reached_the_target_fails(world: World) -> None:
    """What was put back is then said to be of no use: the answers themselves may have changed."""
    assert world.stage(world.releases[2]) == ""
    world.target[1] += 1
    error = world.commit(2)
    assert "could not be restored: the target's weights are no longer" in error
    assert error.startswith("v2: the target's weights") and world.swapper.version == 1


def test_a_draft_that_cannot_be_put_back_is_said_to_be_useless_and_the_next_swap_mends_it(
    world: World,
) -> None:
    assert world.swap(2) == ""
    world.draft.fails = ["put", "put_back"]
    assert world.swap(3) == (
        "v3: MemoryError: no room to put; and the previous draft could not be restored: "
        "MemoryError: no room to put_back; restart this replica"
    )
    assert world.swapper.version == 2 and world.swapper.prove().startswith(
        "the engine holds other weights"
    )
    assert world.swap(4) == "" and world.serves(4)


def test_a_draft_that_was_put_back_but_not_whole_is_said_to_be_useless(world: World) -> None:
    world.draft.kept = tensors(4)
    world.draft.fails = ["put"]
    error = world.swap(2)
    assert "v2: MemoryError: no room to put" in error
    assert "; and the previous draft could not be restored: the engine holds" in error


def test_a_draft_that_was_put_back_without_memory_to_read_it_is_restored(world: World) -> None:
    world.draft.fails = ["read_back", "read_back"]
    assert world.swap(2) == (
        "v2: loading failed, the previous draft was restored: MemoryError: no room to read_back"
    )
    assert world.serves(1)


def test_no_room_to_build_is_said_and_nothing_is_touched(world: World) -> None:
    world.draft.fails = ["build"]
    assert world.stage(world.releases[2]) == "v2: MemoryError: no room to build"
    assert_not_committed(world)


def test_only_what_is_staged_is_committed_and_once(world: World) -> None:
    for version in (1, 2):
        assert world.commit(version).endswith(f": v{version} is not staged")
    assert world.stage(world.releases[2]) == ""
    assert world.commit(3).endswith(": v3 is not staged")
    assert world.swap(2) == ""
    assert world.commit(2).endswith(": v2 is not staged")
    assert world.serves(2)


def test_what_was_dropped_is_not_committed(world: World) -> None:
    assert world.stage(world.releases[2]) == ""
    world.swapper.put_back()
    assert_not_committed(world)


def test_weights_belong_to_no_version_until_they_are_confirmed(world: World) -> None:
    assert world.stage(world.releases[2]) == ""
    assert world.swapper.put(2).held == world.swapper.first_report().held
    assert (world.swapper.version, world.swapper.is_whole) == (1, False)
    assert world.swapper.confirm().version == 2
    assert world.serves(2) and world.swapper.is_whole


def test_weights_that_could_not_be_kept_belong_to_no_version(world: World) -> None:
    """Until they are: the engine may step before it is asked again."""
    assert world.stage(world.releases[2]) == ""
    world.swapper.put(2)
    world.draft.fails = ["keep"]
    assert "no room to keep" in world.swapper.confirm().error
    assert (world.swapper.version, world.swapper.is_whole) == (1, False)
    assert world.swapper.confirm().version == 2 and world.swapper.is_whole


def test_weights_put_back_belong_to_no_version_until_they_are_confirmed(world: World) -> None:
    assert world.stage(world.releases[2]) == ""
    world.swapper.put(2)
    assert world.swapper.put_back().version == 1
    assert not world.swapper.is_whole
    world.swapper.confirm()
    assert world.serves(1) and world.swapper.is_whole


def test_a_thread_that_cannot_be_started_is_a_failed_staging(world: World) -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    swapper = DraftSwapper(world.releases[1], world.draft, begin=no_thread)
    swapper.stage(world.releases[2])
    assert swapper.staging.error == "v2: RuntimeError: can't start new thread"


def test_the_newest_staging_counts_whichever_ends_last(world: World) -> None:
    world.swapper.stage(world.releases[2])
    world.swapper.stage(world.releases[3])
    older, newer = world.waiting
    newer()
    older()
    assert world.swapper.staging.version == 3
    assert world.commit(3) == ""
    assert world.serves(3)


def test_of_two_stagings_only_the_newest_is_committed(world: World) -> None:
    world.swapper.stage(world.releases[2])
    world.swapper.stage(world.releases[3])
    for work in world.waiting:
        work()
    assert world.commit(2).endswith(": v2 is not staged")
    assert world.serves(1)


def test_staging_tells_how_it_goes(world: World) -> None:
    nothing = StagingReport(version=0, done=True, error="nothing staged", seconds=0.0)
    assert world.swapper.staging == nothing
    world.swapper.stage(world.releases[2])
    assert world.swapper.staging == StagingReport(version=2, done=False, error="", seconds=0.0)
    world.waiting.pop()()
    ended = world.swapper.staging
    assert (ended.version, ended.done, ended.error) == (2, True, "")
    assert 0 < ended.seconds < 60
    world.stage(replace(world.releases[3], sha256=""))
    failed = world.swapper.staging
    assert (failed.version, failed.done) == (3, True) and failed.error
    assert 0 < failed.seconds < 60
    world.swap(4)
    assert world.swapper.staging == nothing


def test_a_commit_says_how_long_it_blocked(world: World) -> None:
    assert world.stage(world.releases[2]) == ""
    started = time.perf_counter()
    pause = asyncio.run(world.ranks.commit(2)).pause_s
    assert 0 < pause <= time.perf_counter() - started


def test_a_release_is_read_in_a_thread_of_its_own(world: World) -> None:
    """The engine is not to wait for a disk: `stage` returns while the build waits for it."""
    asked, built_in = threading.Event(), []

    class Slow(Draft):
        def build(self, tensors: Checkpoint) -> Checkpoint:
            assert asked.wait(30)
            built_in.append(threading.current_thread())
            return tensors

    swapper = DraftSwapper(world.releases[1], Slow(tensors(1), tensors(1)))
    swapper.stage(world.releases[2])
    assert not swapper.staging.done
    asked.set()
    while not swapper.staging.done:
        time.sleep(0.001)
    assert built_in[0] is not threading.current_thread() and built_in[0].daemon
    assert swapper.put(2, is_read=False).error == ""


@pytest.mark.parametrize("can_read", [True, False])
def test_without_a_proof_a_swap_is_taken_at_its_word(world: World, can_read: bool) -> None:
    """An engine of other layers, or none asked for a proof: both serve."""

    unreadable = SwapProof(lambda: [(EVERY_RANK, torch.ones(1))], torch.float32)
    swapper = DraftSwapper(
        world.releases[1], world.draft, unreadable if can_read else None, lambda work: work()
    )
    world.draft.loses = NORM
    ranks = ranks_of(swapper)
    staged, committed = asyncio.run(ranks.swap(world.releases[2]))
    assert staged.error == committed.error == "" and swapper.version == 2
    assert ranks.unproved and not committed.proved


def test_the_first_draft_is_proved_to_be_the_first_release(world: World) -> None:
    assert world.serves(1)
    world.draft.live = tensors(2)
    assert world.swapper.prove().startswith("the engine holds other weights")
