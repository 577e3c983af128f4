"""Counts, calibration and proposals of the memory's inner loops, and that both ways of running them
say the same."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from serving.speculation.memory import kernels
from serving.speculation.memory.kernels import (
    AGREED,
    ALONE,
    CONTRADICTED,
    FULL,
    NUM_CELLS,
    NUM_NEXT,
    NUM_ORDERS,
    ORDERS,
    OWN,
    SHARED,
    WAYS,
    Cells,
    Table,
)


def table(num_buckets: int = 64) -> Table:
    num = num_buckets * WAYS
    return Table(
        np.full(num, -1, np.int64),
        np.full(num, -1, np.int64),
        np.zeros((num, NUM_NEXT), np.int32),
        np.zeros((num, NUM_NEXT), np.uint16),
    )


def cells() -> Cells:
    return Cells(np.zeros(NUM_CELLS), np.zeros(NUM_CELLS))


def keys(tokens: list[int], scope: int = 7) -> list[int]:
    key_O = np.zeros(NUM_ORDERS, np.int64)
    num = kernels.suffix_keys(np.array(tokens, np.int32), len(tokens), scope, key_O)
    return [int(key) for key in key_O[:num]]


# -- keys -----------------------------------------------------------------------------------------


def test_a_key_depends_on_its_tokens_and_their_scope_alone() -> None:
    same = keys([1, 2, 3, 4])
    assert same == keys([1, 2, 3, 4])
    assert keys([9, 9, 3, 4])[:2] == same[:2]
    assert keys([9, 9, 3, 4])[2] != same[2]
    assert not set(keys([1, 2, 3, 4], scope=8)) & set(same)
    assert len(set(same)) == len(same)


@pytest.mark.parametrize("length, num", [(0, 0), (1, 1), (4, 4), (5, 4), (14, 7), (40, 7)])
def test_there_is_a_key_for_each_length_that_the_text_has(length: int, num: int) -> None:
    assert len(keys(list(range(length)))) == num == sum(order <= length for order in ORDERS)


def test_keys_fit_into_the_bits_that_arithmetic_leaves_them() -> None:
    all_keys = keys([2**31 - 2] * 20, scope=2**40 - 1)
    assert all(0 <= key < 2**40 for key in all_keys)


# -- entries --------------------------------------------------------------------------------------


def seen(of: Table, key: int) -> dict[int, int]:
    entry = kernels.find(of, key)
    counts = zip(of.token_EN[entry].tolist(), of.count_EN[entry].tolist(), strict=True)
    return {token: count for token, count in counts if count} if entry >= 0 else {}


def test_what_followed_is_counted_and_the_rarest_makes_room() -> None:
    one = table()
    for token in (4, 5, 4, 6, 4, 7, 5, 6):
        kernels.add(one, 11, token, 1)
    assert seen(one, 11) == {4: 3, 5: 2, 6: 2, 7: 1}
    kernels.add(one, 11, 8, 1)
    assert seen(one, 11) == {4: 3, 5: 2, 6: 2, 8: 1}
    assert seen(one, 12) == {}


def test_a_context_that_was_seen_often_forgets_half() -> None:
    one = table()
    for _ in range(FULL):
        kernels.add(one, 11, 4, 1)
    kernels.add(one, 11, 5, 1)
    assert seen(one, 11) == {4: FULL // 2}  # 1 // 2 = 0 of the other
    kernels.add(one, 11, 5, 1)
    assert seen(one, 11) == {4: FULL // 2, 5: 1}


def test_in_a_full_bucket_what_was_longest_not_seen_goes_first() -> None:
    one = table(num_buckets=1)
    for now, key in enumerate(range(100, 100 + WAYS)):
        kernels.add(one, key, 1, now)
    kernels.add(one, 100, 1, WAYS)  # seen again
    kernels.add(one, 999, 1, WAYS + 1)
    assert seen(one, 101) == {}
    assert all(seen(one, key) for key in (100, 102, 999))


def test_what_is_taken_out_leaves_no_token_behind() -> None:
    one = table()
    kernels.add(one, 11, 4321, 1)
    kernels.take_out(one, 11)
    kernels.take_out(one, 12)  # never known
    assert seen(one, 11) == {}
    assert 4321 not in one.token_EN
    assert not one.count_EN.any() and (one.key_E == -1).all()


# -- what a table says ----------------------------------------------------------------------------


def test_the_longest_two_known_contexts_are_looked_at() -> None:
    one, text = table(), [5, 6, 7]
    for key, token in zip(keys(text), (1, 2, 3), strict=True):
        kernels.add(one, key, token, 1)
    kernels.add(one, keys(text)[2], 9, 1)
    kernels.add(one, keys(text)[2], 9, 1)
    found = kernels.look(one, np.array(keys(text)), 3)
    assert found == (2, 9, 2, 3, 1, 2, 1, 1)
    assert kernels.look(one, np.array(keys([5, 8, 7])), 3) == (0, 1, 1, 1, -1, -1, 0, 0)
    assert kernels.look(one, np.array(keys([8])), 1)[0] == -1


def test_states_say_what_the_shorter_context_says() -> None:
    assert kernels.state_of((2, 9, 2, 3, -1, -1, 0, 0)) == ALONE
    assert kernels.state_of((2, 9, 2, 3, 1, 9, 1, 1)) == AGREED
    assert kernels.state_of((2, 9, 2, 3, 1, 4, 1, 1)) == CONTRADICTED


def test_a_kind_that_is_wrong_is_believed_less_and_the_shorter_context_is_taken() -> None:
    one, found = cells(), (3, 9, 1, 1, 0, 4, 2, 2)
    token, before = kernels.opinion(one, OWN, found)
    assert token == 4 and before > 0.8  # twice out of two before once out of one
    for _ in range(30):
        kernels.judge_look(one, OWN, found, 9)
    token, after = kernels.opinion(one, OWN, found)
    assert token == 9 and after > 0.9
    assert kernels.opinion(one, SHARED, found)[0] == 4, "each table is judged for itself"


def test_chances_become_what_is_true() -> None:
    one, rng, found = cells(), np.random.default_rng(0), (2, 9, 3, 4, -1, -1, 0, 0)
    for _ in range(600):
        kernels.judge_look(one, SHARED, found, 9 if rng.random() < 0.35 else 1)
    assert kernels.opinion(one, SHARED, found)[1] == pytest.approx(0.35, abs=0.12)


@pytest.mark.parametrize("own, shared, token", [((4, 0.9), (5, 0.2), 4), ((4, 0.1), (5, 0.3), 5)])
def test_the_better_of_two_opinions_is_followed(
    own: tuple[int, float], shared: tuple[int, float], token: int
) -> None:
    found, chance, _ = kernels.joint(cells(), *own, *shared)
    assert (found, chance) == (token, max(own[1], shared[1]))


def test_opinions_that_agree_are_another_kind_than_those_that_do_not() -> None:
    one = cells()
    _, _, agreed = kernels.joint(one, 4, 0.5, 4, 0.5)
    _, _, differing = kernels.joint(one, 4, 0.5, 5, 0.5)
    for _ in range(40):
        kernels.judge(one, agreed, True)
        kernels.judge(one, differing, False)
    assert kernels.joint(one, 4, 0.5, 4, 0.5)[1] > 0.85
    assert kernels.joint(one, 4, 0.5, 5, 0.5)[1] < 0.15


# -- texts ----------------------------------------------------------------------------------------

SCOPES = (7, 9)


def proposed(
    shared: Table, own: Table, text: list[int], k: int, least: float = 0.0
) -> tuple[list[int], list[float]]:
    token_T = np.zeros(len(text) + k, np.int32)
    token_T[: len(text)] = text
    found_K, survival_K = np.zeros(k, np.int64), np.zeros(k)
    num = kernels.propose(
        shared, own, cells(), token_T, len(text), SCOPES, least, found_K, survival_K
    )
    return found_K[:num].tolist(), survival_K[:num].tolist()


def test_what_followed_before_is_proposed_from_either_table() -> None:
    text = np.array([1, 2, 3, 4, 5, 6], np.int32)
    shared, own, nothing = table(), table(), table()
    kernels.remember(shared, text, 0, 6, SCOPES[SHARED], 1)
    kernels.learn(nothing, own, cells(), text, 0, 6, SCOPES, 1)
    for one, other in ((shared, nothing), (nothing, own)):
        assert proposed(one, other, [9, 2, 3], 5)[0] == [4, 5, 6]
    assert proposed(nothing, shared, [9, 2, 3], 5)[0] == [], "scopes keep them apart"


def test_a_proposal_ends_where_it_is_unlikely_enough() -> None:
    text, shared, own = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32), table(), table()
    kernels.remember(shared, text, 0, 8, SCOPES[SHARED], 1)
    tokens, survival = proposed(shared, own, [1, 2], 6)
    assert tokens == [3, 4, 5, 6, 7, 8]
    assert all(0 < b < a < 1 for a, b in zip(survival, survival[1:], strict=False))
    least = (survival[2] + survival[3]) / 2
    assert proposed(shared, own, [1, 2], 6, least)[0] == [3, 4, 5]


def test_what_is_forgotten_is_neither_proposed_nor_there() -> None:
    text, shared, own = np.array([101, 102, 103, 104], np.int32), table(), table()
    kernels.remember(own, text, 0, 4, SCOPES[OWN], 1)
    kernels.forget(own, text, 0, 4, SCOPES[OWN])
    assert proposed(shared, own, [101, 102], 3)[0] == []
    assert not np.isin([102, 103, 104], own.token_EN).any()


COMPILED = """
import json, sys
import numpy as np
from serving.speculation.memory.compiled import PLAIN, compiled
from serving.speculation.memory.step import Proposed, Windows
from tests.unit.serving.speculation.memory.test_kernels import cells, table
rng, found = np.random.default_rng(3), []
text = np.concatenate([rng.integers(0, 9, 120), np.arange(300, 360), np.arange(300, 360)])
for kernels in (PLAIN, compiled()):
    shared, own, judged, said = table(), table(), cells(), []
    for start in range(0, len(text), 40):
        token_T = np.zeros(60, np.int32)
        token_T[:40] = text[start : start + 40]
        kernels.remember(own, token_T, 0, 40, 9, start)
        kernels.remember(shared, token_T, 0, 40, 7, start)
        ids, survival = np.zeros(8, np.int64), np.zeros(8)
        num = kernels.propose(shared, own, judged, token_T, 40, (7, 9), 0.01, ids, survival)
        said.append([ids[:num].tolist(), survival[:num].tolist()])
    kernels.forget(own, token_T, 0, 40, 9)
    windows = Windows.empty(2, 8)
    windows.scope_S2[:] = [[7, 9], [7, 11]]
    windows.is_kept_S[:] = True, False
    proposed = Proposed(np.zeros(2, np.int64), np.zeros((2, 8), np.int64), np.zeros((2, 8)))
    slot_B, end_B = np.array([1, 0]), np.array([3, 7])
    for start in range(0, 100, 7):
        some = text[start : start + 7].astype(np.int32)
        learns_B = np.array([True, start % 2 == 0])
        kernels.advance(shared, own, judged, windows, slot_B, end_B, some, learns_B, start)
        kernels.propose_all(shared, own, judged, windows, slot_B, 0.01, proposed)
        said.append([[*map(int, proposed.num_B)], proposed.survival_BK.tolist()])
    said.append([windows.token_SW.tolist(), proposed.found_BK.tolist()])
    found.append([said, [int(a.sum()) for a in (*shared, *own)], judged.tried_C.tolist()])
print(json.dumps(found))
"""


def test_compiled_and_plain_kernels_give_the_same_numbers() -> None:
    """In a process of its own: numba in this one would keep engines from starting here."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, compiled = json.loads(done.stdout)
    assert plain == compiled
    assert any(tokens for tokens, _ in plain[0])
