"""Which rows of a step are kept, on the host and on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osd.records import ACCEPTED, PLAIN, REJECTED
from serving.capture import rows
from serving.capture.pick import (
    Landed,
    Lot,
    Picked,
    Transfer,
    pick,
    pick_later,
    pick_on_device,
    pick_on_host,
)
from serving.capture.rows import (
    Logits,
    TopK,
    kinds_of,
    summarise,
    summarise_in_few_kernels,
    summarise_on_cpu,
    summarise_rows,
)
from serving.vllm.hooks import Verification

VOCAB = 40
G = 4


def make_step(rng: np.random.Generator, num_requests: int) -> Verification:
    """Requests with 0 to 4 draft tokens, any of them accepted, some in an unfinished prefill."""
    num_drafts = rng.integers(0, G + 1, num_requests)
    sampled = np.full((num_requests, G + 1), -1)
    for b, n in enumerate(num_drafts):
        num_emitted = rng.integers(1, n + 2)
        sampled[b, :num_emitted] = rng.integers(0, VOCAB, num_emitted)
    return Verification(
        req_ids=[f"r{b}" for b in range(num_requests)],
        num_draft_tokens_B=num_drafts,
        is_partial_B=rng.random(num_requests) < 0.2,
        draft_ids=torch.from_numpy(rng.integers(0, VOCAB, num_drafts.sum())).int(),
        first_position_B=torch.from_numpy(rng.integers(1, 100, num_requests)),
        sampled_BG=torch.from_numpy(sampled).int(),
        logits=torch.from_numpy(rng.normal(size=((num_drafts + 1).sum(), VOCAB))).float(),
    )


def make_lot(
    rng: np.random.Generator,
    step: Verification,
    accepted: float = 0.4,
    plain: float = 0.6,
    captured: float = 0.8,
) -> Lot:
    num_requests = len(step.req_ids)
    chance_BG = rng.random((num_requests, G + 1))
    return Lot(
        rng.random(num_requests) < captured, chance_BG, np.array([1.0, accepted, plain]), top_k=8
    )


def top_of(landed: Landed) -> TopK:
    assert landed.rows is not None
    return rows.top_of([landed.rows.scores.of(np.arange(len(landed.rows.kind_R)))], 8)


@pytest.mark.parametrize(
    ("accepted", "plain"), [(0.4, 0.6), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.7, 0.1)]
)
def test_a_device_keeps_the_rows_a_host_keeps(accepted: float, plain: float) -> None:
    rng = np.random.default_rng(1)
    num_rows = 0
    for size in [1, 2, 3, 7, 12] * 8:
        step = make_step(rng, size)
        lot = make_lot(rng, step, accepted, plain)
        expected, got = pick_on_host(step, lot).land(), pick_on_device(step, lot).land()
        np.testing.assert_array_equal(got.sampled_BG, expected.sampled_BG)
        np.testing.assert_array_equal(got.position_B, expected.position_B)
        if expected.rows is None:
            assert got.rows is None
            continue
        assert got.rows is not None
        for name in ("request_R", "offset_R", "kind_R", "draft_id_R", "keep_prob_R"):
            np.testing.assert_array_equal(
                getattr(got.rows, name), getattr(expected.rows, name), err_msg=name
            )
        for name in ("ids_RK", "logprobs_RK", "tail_R"):
            left, right = getattr(top_of(got), name), getattr(top_of(expected), name)
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right, err_msg=name)
        num_rows += len(expected.rows.kind_R)
    assert num_rows > 40


def test_rows_are_those_of_their_request_and_offset() -> None:
    """Two requests, drafts [5, 6] and [7, 8, 9]; one draft accepted of the first, all of the
    second."""
    step = Verification(
        req_ids=["a", "b"],
        num_draft_tokens_B=np.array([2, 3]),
        is_partial_B=np.array([False, False]),
        draft_ids=torch.tensor([5, 6, 7, 8, 9]),
        first_position_B=torch.tensor([10, 20]),
        sampled_BG=torch.tensor([[5, 1, -1, -1], [7, 8, 9, 2]]),
        logits=torch.arange(7.0)[:, None] * torch.ones(7, VOCAB),
    )
    lot = Lot(np.array([True, True]), np.zeros((2, 4)), np.array([1.0, 0.5, 0.25]), top_k=4)
    rows = pick_on_host(step, lot).land().rows
    assert rows is not None
    assert isinstance(rows.scores, Logits)
    assert rows.request_R.tolist() == [0, 0, 1, 1, 1, 1]
    assert rows.offset_R.tolist() == [0, 1, 0, 1, 2, 3]
    assert rows.kind_R.tolist() == [ACCEPTED, REJECTED, ACCEPTED, ACCEPTED, ACCEPTED, PLAIN]
    assert rows.draft_id_R.tolist() == [5, 6, 7, 8, 9, -1]
    assert rows.keep_prob_R.tolist() == [0.5, 1.0, 0.5, 0.5, 0.5, 0.25]
    assert rows.scores.logits_RV[:, 0].tolist() == [0, 1, 3, 4, 5, 6]


def test_the_device_is_asked_for_nothing() -> None:
    """On `meta` tensors, which hold no data, any read of a value or of a size that depends on
    values raises."""
    rng = np.random.default_rng(2)
    step = make_step(rng, 9)
    on_meta = Verification(
        req_ids=step.req_ids,
        num_draft_tokens_B=step.num_draft_tokens_B,
        is_partial_B=step.is_partial_B,
        draft_ids=step.draft_ids.to("meta"),
        first_position_B=step.first_position_B.to("meta"),
        sampled_BG=step.sampled_BG.to("meta"),
        logits=step.logits.to("meta"),
    )
    picked = pick(on_meta, make_lot(rng, step), rows.RowPool())
    # Bounded by the lot: never all rows of the step, let alone the whole vocabulary.
    assert 0 < picked.nbytes < 9 * (G + 1) * (8 * 6 + 4) + 9 * (G + 3) * 8
    with pytest.raises(NotImplementedError):
        on_meta.sampled_BG.cpu()


def test_copies_are_the_hosts_own_since_the_engine_uses_its_buffers_again() -> None:
    rng = np.random.default_rng(3)
    step = make_step(rng, 6)
    lot = make_lot(rng, step, captured=1.0)
    for way in (pick_on_host, pick_on_device):
        first = way(step, lot)
        again = way(step, lot).land()
        sampled, positions, logits = (
            step.sampled_BG.clone(),
            step.first_position_B.clone(),
            step.logits.clone(),
        )
        step.sampled_BG.fill_(3)
        step.first_position_B.fill_(3)
        step.logits.fill_(3.0)
        landed = first.land()
        np.testing.assert_array_equal(landed.sampled_BG, again.sampled_BG)
        np.testing.assert_array_equal(landed.position_B, again.position_B)
        np.testing.assert_array_equal(top_of(landed).ids_RK, top_of(again).ids_RK)
        step.sampled_BG.copy_(sampled)
        step.first_position_B.copy_(positions)
        step.logits.copy_(logits)


def test_kept_fractions_are_those_promised() -> None:
    rng = np.random.default_rng(4)
    kinds = []
    everything = []
    for _ in range(300):
        step = make_step(rng, 12)
        lot = make_lot(rng, step, accepted=0.25, plain=0.5, captured=1.0)
        landed = pick_on_device(step, lot).land()
        if landed.rows is not None:
            kinds.append(landed.rows.kind_R)
        everything.append(kinds_of(landed.sampled_BG, step.num_draft_tokens_B).ravel())
    kept, total = np.concatenate(kinds), np.concatenate(everything)
    for kind, fraction in ((REJECTED, 1.0), (ACCEPTED, 0.25), (PLAIN, 0.5)):
        num = (total == kind).sum()
        assert num > 500
        assert abs((kept == kind).sum() - num * fraction) <= 4 * np.sqrt(
            num * fraction * (1 - fraction)
        )


def test_a_summary_is_the_log_softmax_and_the_rest_of_its_mass() -> None:
    logits = torch.randn(5, VOCAB, dtype=torch.bfloat16)
    ids, logprobs, tail = summarise(logits, 7)
    expected = logits.float().log_softmax(-1)
    assert (ids.dtype, logprobs.dtype, tail.dtype) == (torch.int32, torch.float16, torch.float32)
    torch.testing.assert_close(
        logprobs.float(), expected.gather(1, ids.long()), atol=5e-3, rtol=1e-3
    )
    rest = expected.scatter(1, ids.long(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(tail, rest)
    some = torch.tensor([4, 0, 2])
    before = logits.float()
    for max_elements in (1, 2 * VOCAB, 1 << 20):
        for part, all_ in zip(
            summarise_rows(before, some, 7, max_elements), (ids, logprobs, tail), strict=True
        ):
            torch.testing.assert_close(part, all_[some])
    assert torch.equal(before, logits.float())
    whole = summarise(logits, 100)
    assert whole[0].shape == (5, VOCAB)
    assert (whole[2] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_device_summarises_as_a_cpu_does(dtype: torch.dtype) -> None:
    logits = (8 * torch.randn(6, 4096)).to(dtype)
    logits[0, 7] = 60.0  # nearly all of the mass: its rest is a small difference
    here = summarise_on_cpu(logits.float().clone(), 9)
    there = summarise_in_few_kernels(logits.clone(), 9)
    values = logits.float().gather(1, here[0].long())
    assert [part.dtype for part in there] == [part.dtype for part in here]
    assert torch.equal(values, logits.float().gather(1, there[0].long())), "equal logits may swap"
    torch.testing.assert_close(there[1], here[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(there[2], here[2], atol=1e-3, rtol=1e-4)
    assert here[2][0] < -10.0


def test_a_transfer_brings_tensors_of_all_kinds_as_they_were() -> None:
    tensors = [
        torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
        torch.tensor([1.5, 2.5, -3.0], dtype=torch.float16),
        torch.tensor([1 << 40]),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([[0.25]]).expand(2, 2),
        torch.arange(9, dtype=torch.int32)[4:],
        torch.tensor(7, dtype=torch.float64),
    ]
    transfer = Transfer(tensors)
    assert transfer.nbytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    for got, tensor in zip(transfer.wait(), tensors, strict=True):
        assert got.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(got, tensor.numpy())


class Launches(TorchDispatchMode):
    """Counts what a device would be asked to do: operations that write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _memory_of((args, kwargs))
        made = func(*args, **(kwargs or {}))
        self.num += func._schema.name.endswith("_") or not _memory_of(made) <= given
        return made


def _memory_of(tree: Any) -> set[int]:
    """Of the tensors among these."""
    leaves = tree_leaves(tree)
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}


def test_a_step_costs_the_engine_few_launches() -> None:
    """Each takes its thread some microseconds, however small the step."""
    rng = np.random.default_rng(0)
    step = make_step(rng, 8)
    on_meta = replace(
        step,
        draft_ids=step.draft_ids.to("meta"),
        first_position_B=step.first_position_B.to("meta"),
        sampled_BG=step.sampled_BG.to("meta"),
        logits=step.logits.to("meta"),
    )
    with Launches() as launches:
        pick_on_device(on_meta, make_lot(rng, step))
    # 9 find the rows and copy them, 8 summarise them, one packs all for the way.
    assert launches.num <= 18


def test_a_step_that_is_looked_at_later_is_the_one_that_was() -> None:
    """The engine uses its tensors again as soon as the hook returns."""
    rng = np.random.default_rng(2)
    for size in (1, 3, 12):
        step = make_step(rng, size)
        lot = make_lot(rng, step)
        expected = pick_on_host(step, lot, rows.RowPool()).land()
        later = pick_later(step, lot)
        for tensor in (step.logits, step.sampled_BG, step.draft_ids, step.first_position_B):
            tensor.fill_(1)
        got = later.land()
        np.testing.assert_array_equal(got.sampled_BG, expected.sampled_BG)
        np.testing.assert_array_equal(got.position_B, expected.position_B)
        assert (got.rows is None) == (expected.rows is None)
        if expected.rows is not None and got.rows is not None:
            for name in ("request_R", "offset_R", "kind_R", "draft_id_R", "keep_prob_R"):
                np.testing.assert_array_equal(getattr(got.rows, name), getattr(expected.rows, name))
            np.testing.assert_array_equal(top_of(got).ids_RK, top_of(expected).ids_RK)


def test_a_step_that_was_looked_at_keeps_nothing_of_the_engines() -> None:
    rng = np.random.default_rng(6)
    step = make_step(rng, 12)
    lot = make_lot(rng, step)
    expected, picked = pick_on_host(step, lot).land(), pick_on_host(step, lot, rows.RowPool())
    for tensor in (step.logits, step.sampled_BG, step.draft_ids, step.first_position_B):
        tensor.fill_(1)
    got = picked.land()
    assert expected.rows is not None and got.rows is not None
    np.testing.assert_array_equal(got.rows.draft_id_R, expected.rows.draft_id_R)
    np.testing.assert_array_equal(got.position_B, expected.position_B)
    np.testing.assert_array_equal(top_of(got).ids_RK, top_of(expected).ids_RK)


def plain_step(num_requests: int, size: int) -> Verification:
    """Of requests without draft tokens, each of which is served its own number."""
    sampled = torch.arange(num_requests)[:, None]
    return Verification(
        req_ids=[f"r{b}" for b in range(num_requests)],
        num_draft_tokens_B=np.zeros(num_requests, np.int64),
        is_partial_B=np.zeros(num_requests, bool),
        draft_ids=torch.empty(0, dtype=torch.int32),
        first_position_B=torch.arange(num_requests) + 1,
        sampled_BG=sampled.int(),
        logits=torch.zeros(num_requests, size),
    )


def test_steps_of_up_to_a_mebibyte_of_logits_are_left_to_the_capture_thread() -> None:
    pool = rows.RowPool()
    step, larger = plain_step(256, 1024), plain_step(257, 1024)
    keep_one = np.arange(257) == 3
    lot = Lot(keep_one[:256], np.zeros((256, 1)), np.ones(3), top_k=4)
    assert pick(step, lot, pool).nbytes == step.logits.nbytes == 1 << 20
    assert pick(step, replace(lot, captured_B=np.zeros(256, bool)), pool).nbytes == 0, (
        "nothing is to be kept"
    )
    chosen = pick(larger, Lot(keep_one, np.zeros((257, 1)), np.ones(3), top_k=4), pool)
    assert chosen.nbytes == rows.ROWS_AT_ONCE * 1024 * 4, "memory of the pool"
    for picked in (pick(step, lot, pool), chosen):
        landed = picked.land()
        assert landed.rows is not None
        assert landed.rows.request_R.tolist() == [3]
        assert landed.sampled_BG[3] == 3


@pytest.mark.parametrize("way", [pick_on_host, pick_on_device])
def test_a_row_is_kept_when_its_lot_lies_under_its_probability(
    way: Callable[[Verification, Lot], Picked],
) -> None:
    """Not when it is the same: at a fraction of 0 no row is kept, at 1 every one. Of those who are
    not captured, or whose prefill is not through, none."""
    step = plain_step(6, VOCAB)
    step.is_partial_B[5] = True
    chance = np.array([[0.0], [0.25], [0.5], [0.99], [0.0], [0.0]])
    captured = np.array([True, True, True, True, False, True])
    for fraction, kept in ((0.0, []), (0.25, [0]), (0.3, [0, 1]), (1.0, [0, 1, 2, 3])):
        landed = way(step, Lot(captured, chance, np.array([1.0, 1.0, fraction]), top_k=2)).land()
        assert (landed.rows.request_R.tolist() if landed.rows is not None else []) == kept
        assert landed.position_B.tolist() == [1, 2, 3, 4, 5, 6]
        assert landed.sampled_BG[:, 0].tolist() == [0, 1, 2, 3, 4, -1]


def test_what_is_on_its_way_from_a_device_is_counted() -> None:
    step = plain_step(3, VOCAB)
    nothing = Lot(np.zeros(3, bool), np.zeros((3, 1)), np.ones(3), top_k=2)
    tokens_and_positions = 3 * 4 + 3 * 8
    assert pick_on_device(step, nothing).nbytes == tokens_and_positions
    one = replace(
        nothing, captured_B=np.array([False, True, False]), keep_prob=np.array([1.0, 0.0, 0.0])
    )
    assert pick_on_device(step, one).nbytes == tokens_and_positions + 2 * (4 + 2) + 4


@pytest.mark.parametrize("size", [128 * 40, 128 * 40 + 1, 128 * 33 + 127, 151_936])
def test_the_top_of_a_large_vocabulary_is_the_top_of_all(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(size=(5, size))).float()
    logits[1, -9:] = 30.0 + torch.arange(9)  # all within the last, half block
    logits[2, 256:384] = 20.0 + torch.arange(128) / 128  # all within one block
    logits[3] = -torch.inf
    logits[3, 77] = 1.0
    values, ids = rows._topk(logits, 8)
    expected = logits.topk(8)
    assert torch.equal(values, expected.values)
    assert torch.equal(logits.gather(1, ids), expected.values)
    assert torch.equal(ids[:3], expected.indices[:3]), "no two logits are alike there"
    assert all(len(set(one)) == 8 for one in ids.tolist())


def test_the_rows_of_many_steps_are_as_those_of_each() -> None:
    """Also where they are too many to be summarised together."""
    rng, size = np.random.default_rng(3), rows.MAX_ELEMENTS // 9
    steps = [Logits(torch.from_numpy(rng.normal(size=(n, size))).float()) for n in (1, 7, 2, 30, 1)]
    alone = [rows.top_of([one.of(np.arange(len(one.logits_RV)))], 8) for one in steps]
    # One of them came from a device.
    together = rows.top_of([steps[0], steps[1], alone[2], *steps[3:]], 8)
    for name in ("ids_RK", "logprobs_RK", "tail_R"):
        found, expected = (
            getattr(together, name),
            np.concatenate([getattr(one, name) for one in alone]),
        )
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
