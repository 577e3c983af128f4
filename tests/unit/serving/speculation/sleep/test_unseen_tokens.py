"""Tokens kept on the device while the draft sleeps."""

from __future__ import annotations

import numpy as np
import torch

from serving.speculation.sleep.unseen_tokens import FIRST_COLUMNS, FIRST_ROWS, UnseenTokens

CPU = torch.device("cpu")


def write(unseen: UnseenTokens, fed: dict[str, tuple[int, list[int]]]) -> None:
    """`fed`: request -> (first position, tokens of this step)"""
    tokens = [token for _, ids in fed.values() for token in ids]
    ends = np.cumsum([0, *(len(ids) for _, ids in fed.values())])
    starts_B = np.array([start for start, _ in fed.values()])
    unseen.write(list(fed), starts_B, ends, torch.tensor([*tokens, 99, 99]))


def read(unseen: UnseenTokens, req_id: str, positions: range) -> list[int]:
    known_T = -np.array(positions)
    return unseen.read([req_id] * len(positions), np.array(positions), known_T).tolist()


def test_what_was_fed_is_read_and_the_host_knows_the_rest() -> None:
    unseen = UnseenTokens(1000, CPU)
    unseen.begin("a", 3)
    unseen.begin("b", 10)
    write(unseen, {"a": (1, [21, 22, 23]), "b": (10, [30])})
    write(unseen, {"b": (11, [31]), "a": (4, [24])})
    assert read(unseen, "a", range(1, 5)) == [-1, -2, 23, 24]
    assert read(unseen, "b", range(9, 12)) == [-9, 30, 31]
    assert read(unseen, "stranger", range(2, 4)) == [-2, -3]


def test_a_rejected_token_is_replaced_by_the_one_fed_later() -> None:
    unseen = UnseenTokens(1000, CPU)
    unseen.begin("a", 3)
    write(unseen, {"a": (3, [23, 24, 25])})
    write(unseen, {"a": (4, [44])})
    assert read(unseen, "a", range(3, 5)) == [23, 44]


def test_it_grows_with_requests_and_with_their_length() -> None:
    unseen = UnseenTokens(1000, CPU)
    names = [f"{i}" for i in range(3 * FIRST_ROWS)]
    for i, name in enumerate(names):
        unseen.begin(name, 0)
        write(unseen, {name: (0, [i])})
    last = 3 * FIRST_COLUMNS
    write(unseen, {"0": (last, [77])})
    assert [read(unseen, name, range(1)) for name in names] == [[i] for i in range(len(names))]
    assert read(unseen, "0", range(last, last + 1)) == [77]
    assert unseen._table.shape == (4 * FIRST_ROWS, 1000), "no request has more tokens"


def test_rows_of_requests_that_are_gone_are_used_again() -> None:
    unseen = UnseenTokens(1000, CPU)
    for i in range(20):
        unseen.begin(f"{i}", i)
        unseen.begin(f"{i}'", i)
        unseen.end([f"{i}", "stranger"])
        unseen.end_all_but(set())
        assert f"{i}'" not in unseen
    assert len(unseen._table) == FIRST_ROWS
