"""What was found lately, and who is looked up where nothing found may be proposed."""

from __future__ import annotations

import numpy as np

from serving.speculation.memory.lookups import (
    NUM_LOOKUPS,
    NUM_LOOKUPS_OF_ALL,
    NUM_UNUSED,
    Lookups,
    Turns,
    found_lately,
)


def lookups(*survival: float, room: int = NUM_LOOKUPS) -> Lookups:
    """With room for so many, of one token each."""
    found = Lookups(room, 2)
    for one in survival:
        found.add(np.array([one]) if one else np.zeros(0))
    return found


def test_the_newest_come_first_whatever_was_overwritten() -> None:
    assert lookups(0.1, 0.2, room=3).newest(3)[:, 0].tolist() == [0.2, 0.1]
    full = lookups(0.1, 0.2, 0.3, 0.4, 0.5, room=3)
    assert full.newest(2)[:, 0].tolist() == [0.5, 0.4]
    assert full.newest(9)[:, 0].tolist() == [0.5, 0.4, 0.3]
    full.add(np.zeros(0))
    assert full.newest(1).tolist() == [[0, 0]], "nothing is left of what stood there before"


def test_others_stand_for_what_a_request_has_not_had_yet() -> None:
    own, others = lookups(0.9), lookups(0.1, 0.2)
    assert own.completed(1, others)[:, 0].tolist() == [0.9]
    assert own.completed(4, others)[:, 0].tolist() == [0.9, 0.2, 0.1, 0.2]
    assert own.completed(3, lookups())[:, 0].tolist() == [0.9, 0, 0]


def test_of_many_requests_the_newest_look_up_of_each_is_enough() -> None:
    everybody = lookups(0.5, room=NUM_LOOKUPS_OF_ALL)
    many = [lookups(*np.linspace(0, 1, 11)) for _ in range(NUM_LOOKUPS_OF_ALL)]
    found_BRM = found_lately(many, everybody)
    assert found_BRM.shape == (NUM_LOOKUPS_OF_ALL, 1, 2) and (found_BRM[:, :, 0] == 1).all()
    few = found_lately([many[0], None], everybody)
    assert few.shape == (2, NUM_LOOKUPS, 2)
    assert few[0, :, 0].tolist() == np.linspace(0, 1, 11)[::-1][:NUM_LOOKUPS].tolist()
    assert not few[1].any(), "nothing is known of one for whom nobody asks"


def test_where_it_is_of_no_use_few_are_looked_up_and_all_in_turn() -> None:
    served = [(str(b), [b]) for b in range(2 * NUM_UNUSED)]
    turns, due = Turns(), []
    for _ in range(4):
        ordered, num = turns.begin(served, is_unused=True)
        assert num == NUM_UNUSED and sorted(ordered) == sorted(served)
        now = {req_id for req_id, _ in served if turns.is_due(req_id)}
        assert now == {req_id for req_id, _ in ordered[:num]}, "those that are due come first"
        due.append(now)
    assert due[0] == due[2] and due[1] == due[3]
    assert due[0] | due[1] == {req_id for req_id, _ in served}
    assert turns.begin(served, is_unused=False) == (served, len(served))
    assert all(turns.is_due(req_id) for req_id, _ in served)
    few = served[:NUM_UNUSED]
    assert turns.begin(few, is_unused=True) == (few, NUM_UNUSED), "few requests wait for no turn"
    assert turns.begin([], is_unused=True) == ([], 0)
