"""The inner loops of the memory: plain functions over arrays, which numba compiles where it may
(`compiled.py`).

    suffix_keys   the contexts that the text ends with: keys, the shortest first
    look          their entries in a table: what followed the longest two that are known
    opinion       the likelier of these two tokens, and how likely it is (first calibration)
    joint         the better of both tables' opinions, and how likely it is (second calibration)

An entry stands for a context: the last n tokens of some text, n in `ORDERS`. Its key is a hash of
them and of the scope that they were served in. Arithmetic stays within 62 bits, so that Python and
compiled code give the same numbers.

Both calibrations count, in cells, how often a token of such a kind was right. The kind: which
table, how long a context, how often seen, which share of it the token has, and whether the shorter
context says the same; then, how likely both tables held theirs, and whether they agree.

Legend: E entries, N next tokens of an entry, O orders, C cells, T tokens of a text, K of a
proposal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ORDERS = (1, 2, 3, 4, 6, 9, 14)
"""Lengths of the contexts that are remembered."""
LONGEST = ORDERS[-1]
NUM_ORDERS = len(ORDERS)
NUM_NEXT = 4
"""Next tokens an entry can hold; another one takes the place of the rarest."""
WAYS = 8
"""Entries of a bucket. A new one takes the place of the one that was longest not seen."""
FULL = 64
"""Times seen at which the counts of an entry are halved: what came lately weighs more."""

SHARED, OWN = 0, 1
"""Where a context is known from: the answers to earlier requests, or the request itself."""
MAX_TIMES, NUM_SHARES = 6, 5
"""More times seen are one kind; shares fall into so many."""
ALONE, AGREED, CONTRADICTED, SHORTER = 0, 1, 2, 3
"""What the shorter context says of a token, or that it is the shorter one's own."""
NUM_STATES = 4
NUM_FIRST = 2 * NUM_ORDERS * MAX_TIMES * NUM_SHARES * NUM_STATES
NUM_CHANCES, NUM_OTHERS = 12, 6
NUM_CELLS = NUM_FIRST + NUM_CHANCES * NUM_OTHERS * 2
PRIOR_WEIGHT = 8.0
"""Evidence that a cell's prior counts as."""
KEEP = 0.98
"""Weight that a cell's evidence keeps after one more."""

KEY_BITS = 40
_KEY_MASK = (1 << KEY_BITS) - 1
_FACTOR, _STEP, _SHIFT = 0x2545F5, 0x9E3779, 19
_FREE = -1

Look = tuple[int, int, int, int, int, int, int, int]
"""(order, token, times it followed, times seen) of the longest known context, then of the next
shorter one; order -1 where there is none."""


class Table(NamedTuple):
    """What followed which context. Buckets of `WAYS` entries."""

    key_E: np.ndarray
    """int64; -1 = free"""
    seen_E: np.ndarray
    """int64: when the entry was last added to"""
    token_EN: np.ndarray
    """int32"""
    count_EN: np.ndarray
    """uint16"""


class Cells(NamedTuple):
    """How often tokens of each kind were right."""

    right_C: np.ndarray
    """float64"""
    tried_C: np.ndarray
    """float64"""


# -- tables ---------------------------------------------------------------------------------------


def suffix_keys(token_T: np.ndarray, end: int, scope: int, key_O: np.ndarray) -> int:
    """Write the keys of the contexts that end before `end`. Returns their number."""
    key, num = scope, 0
    for i in range(1, min(end, LONGEST) + 1):
        key = ((key ^ (int(token_T[end - i]) + 1)) * _FACTOR + _STEP) & _KEY_MASK
        key = key ^ (key >> _SHIFT)
        if i == ORDERS[num]:
            key_O[num] = key
            num += 1
    return num


def fetch(table: Table, key_O: np.ndarray, num: int) -> int:
    """Read where the entries of the contexts may be. Tables are larger than caches: memory is
    waited for once, as no read depends on another, and what follows finds all of it at hand."""
    read = 0
    for o in range(num):
        first = bucket(table, int(key_O[o]))
        read += int(table.key_E[first]) ^ int(table.seen_E[first])
        read ^= int(table.count_EN[first, 0]) + int(table.token_EN[first, 0])
        read ^= int(table.token_EN[first + WAYS // 2, 0])
    return read


def find(table: Table, key: int) -> int:
    """The entry of a key; -1 when there is none."""
    first = bucket(table, key)
    for entry in range(first, first + WAYS):
        if table.key_E[entry] == key:
            return entry
    return -1


def add(table: Table, key: int, token: int, now: int) -> None:
    """The token followed the context."""
    entry = find(table, key)
    if entry < 0:
        entry = oldest(table, bucket(table, key))
        table.key_E[entry] = key
        table.count_EN[entry, :] = 0
    table.seen_E[entry] = now
    place, total, is_known = 0, 0, False
    for n in range(NUM_NEXT):
        count = int(table.count_EN[entry, n])
        total += count
        if count > 0 and table.token_EN[entry, n] == token:
            place, is_known = n, True
        elif not is_known and count < table.count_EN[entry, place]:
            place = n
    if not is_known:
        table.token_EN[entry, place] = token
        table.count_EN[entry, place] = 0
    table.count_EN[entry, place] += 1
    if total >= FULL:
        for n in range(NUM_NEXT):
            table.count_EN[entry, n] //= 2


def take_out(table: Table, key: int) -> None:
    """Forget a context."""
    entry = find(table, key)
    if entry >= 0:
        table.key_E[entry] = _FREE
        table.seen_E[entry] = _FREE
        table.count_EN[entry, :] = 0
        table.token_EN[entry, :] = 0


def oldest(table: Table, first: int) -> int:
    """The entry of a bucket that was longest not seen, a free one before all."""
    found = first
    for entry in range(first + 1, first + WAYS):
        if table.seen_E[entry] < table.seen_E[found]:
            found = entry
    return found


def bucket(table: Table, key: int) -> int:
    """The first entry where a key may be."""
    return (key % (len(table.key_E) // WAYS)) * WAYS


# -- how likely -----------------------------------------------------------------------------------


def look(table: Table, key_O: np.ndarray, num: int) -> Look:
    """What followed the longest two of the contexts that the table knows."""
    order, token, count, total = -1, -1, 0, 0
    for o in range(num - 1, -1, -1):
        entry = find(table, int(key_O[o]))
        if entry < 0:
            continue
        best, seen = 0, 0
        for n in range(NUM_NEXT):
            seen += int(table.count_EN[entry, n])
            if table.count_EN[entry, n] > table.count_EN[entry, best]:
                best = n
        likeliest, times = int(table.token_EN[entry, best]), int(table.count_EN[entry, best])
        if order >= 0:
            return order, token, count, total, o, likeliest, times, seen
        order, token, count, total = o, likeliest, times, seen
    return order, token, count, total, -1, -1, 0, 0


def opinion(cells: Cells, source: int, seen: Look) -> tuple[int, float]:
    """The likelier token, and its chance; (-1, 0) where no context is known."""
    order, token, count, total, shorter, other, other_count, other_total = seen
    if order < 0:
        return -1, 0.0
    cell = first_cell(source, order, count, total, state_of(seen))
    chance = estimate(cells, cell, (count + 0.35) / (total + 0.9))
    if shorter < 0 or token == other:
        return token, chance
    cell = first_cell(source, shorter, other_count, other_total, SHORTER)
    other_chance = estimate(cells, cell, (other_count + 0.35) / (other_total + 0.9))
    return (token, chance) if chance >= other_chance else (other, other_chance)


def joint(
    cells: Cells, own: int, own_chance: float, shared: int, shared_chance: float
) -> tuple[int, float, int]:
    """(token, its chance, its cell) of the better opinion."""
    token, chance, other = own, own_chance, shared_chance
    if shared_chance > own_chance:
        token, chance, other = shared, shared_chance, own_chance
    place = min(int(chance * NUM_CHANCES), NUM_CHANCES - 1) * NUM_OTHERS
    place = (place + min(int(other * NUM_OTHERS), NUM_OTHERS - 1)) * 2 + int(own == shared)
    return token, estimate(cells, NUM_FIRST + place, chance), NUM_FIRST + place


def state_of(seen: Look) -> int:
    """What the shorter context says of the longer one's token."""
    if seen[4] < 0:
        return ALONE
    return AGREED if seen[1] == seen[5] else CONTRADICTED


def first_cell(source: int, order: int, count: int, total: int, state: int) -> int:
    """The cell of a token that followed `count` of the `total` times a context was seen."""
    times = min(total, MAX_TIMES) - 1
    share = min(NUM_SHARES * count // total, NUM_SHARES - 1)
    kind = ((source * NUM_ORDERS + order) * MAX_TIMES + times) * NUM_SHARES + share
    return kind * NUM_STATES + state


def estimate(cells: Cells, cell: int, prior: float) -> float:
    """Probability that a token of this kind is right."""
    weight = float(cells.tried_C[cell]) + PRIOR_WEIGHT
    return (float(cells.right_C[cell]) + PRIOR_WEIGHT * prior) / weight


def judge(cells: Cells, cell: int, is_right: bool) -> None:
    """A token of this kind was right, or wrong."""
    cells.tried_C[cell] = cells.tried_C[cell] * KEEP + 1.0
    cells.right_C[cell] = cells.right_C[cell] * KEEP + (1.0 if is_right else 0.0)


def judge_look(cells: Cells, source: int, seen: Look, token: int) -> None:
    """The token was served: judge what a table would have said."""
    order, first, count, total, shorter, other, other_count, other_total = seen
    if order < 0:
        return
    state = state_of(seen)
    judge(cells, first_cell(source, order, count, total, state), first == token)
    if state == CONTRADICTED:
        cell = first_cell(source, shorter, other_count, other_total, SHORTER)
        judge(cells, cell, other == token)


# -- what the memory calls ------------------------------------------------------------------------


def propose(
    shared: Table,
    own: Table,
    cells: Cells,
    token_T: np.ndarray,
    end: int,
    scopes: tuple[int, int],
    least: float,
    found_K: np.ndarray,
    survival_K: np.ndarray,
) -> int:
    """Write what may follow, as long as it is accepted with a probability of at least `least`.
    Returns the number of tokens. `token_T` must have room for them behind `end`."""
    key_O = np.empty(NUM_ORDERS, np.int64)
    survival = 1.0
    for k in range(len(found_K)):
        num = suffix_keys(token_T, end + k, scopes[SHARED], key_O)
        shared_token, shared_chance = opinion(cells, SHARED, look(shared, key_O, num))
        num = suffix_keys(token_T, end + k, scopes[OWN], key_O)
        own_token, own_chance = opinion(cells, OWN, look(own, key_O, num))
        token, chance, _ = joint(cells, own_token, own_chance, shared_token, shared_chance)
        survival *= chance
        if token < 0 or survival < least:
            return k
        found_K[k] = token
        survival_K[k] = survival
        token_T[end + k] = token
    return len(found_K)


def learn(
    shared: Table,
    own: Table,
    cells: Cells,
    token_T: np.ndarray,
    first: int,
    end: int,
    scopes: tuple[int, int],
    now: int,
) -> int:
    """Tokens `first` to `end` were served: judge what would have been said of each, and remember it
    as the request's own. Returns what was fetched, so that it is."""
    shared_O, own_O = np.empty(NUM_ORDERS, np.int64), np.empty(NUM_ORDERS, np.int64)
    read = 0
    for at in range(first, end):
        served = int(token_T[at])
        num = suffix_keys(token_T, at, scopes[SHARED], shared_O)
        suffix_keys(token_T, at, scopes[OWN], own_O)
        read ^= fetch(shared, shared_O, num) ^ fetch(own, own_O, num)
        shared_look, own_look = look(shared, shared_O, num), look(own, own_O, num)
        shared_token, shared_chance = opinion(cells, SHARED, shared_look)
        own_token, own_chance = opinion(cells, OWN, own_look)
        token, _, cell = joint(cells, own_token, own_chance, shared_token, shared_chance)
        if token >= 0:
            judge(cells, cell, token == served)
        judge_look(cells, SHARED, shared_look, served)
        judge_look(cells, OWN, own_look, served)
        for order in range(num):
            add(own, int(own_O[order]), served, now)
    return read


def remember(table: Table, token_T: np.ndarray, first: int, end: int, scope: int, now: int) -> int:
    """Tokens `first` to `end` followed what stands before them. Returns what was fetched, so that
    it is."""
    key_O, read = np.empty(NUM_ORDERS, np.int64), 0
    for at in range(first, end):
        num = suffix_keys(token_T, at, scope, key_O)
        read ^= fetch(table, key_O, num)
        for order in range(num):
            add(table, int(key_O[order]), int(token_T[at]), now)
    return read


def forget(table: Table, token_T: np.ndarray, first: int, end: int, scope: int) -> None:
    """Take out all that `remember` or `learn` added of tokens `first` to `end`."""
    key_O = np.empty(NUM_ORDERS, np.int64)
    for at in range(first, end):
        for order in range(suffix_keys(token_T, at, scope, key_O)):
            take_out(table, int(key_O[order]))
