"""What a memory proposes, to whom, and what it keeps of whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from serving.speculation.memory import memory as module
from serving.speculation.memory.kernels import Table
from serving.speculation.memory.memory import BYTES_PER_ENTRY, TOKENS_PER_STEP, Memory

SECRET = [901, 902, 903, 904, 905, 906]


def memory(max_bytes: int = 1 << 20, k: int = 8) -> Memory:
    return Memory(max_bytes, k)


def served(
    one: Memory, name: str, prompt: Sequence[int], answer: Sequence[int], **given: object
) -> None:
    """A request from its beginning to its end."""
    one.begin(name, prompt, **given)  # type: ignore[arg-type]
    for start in range(0, len(answer), 3):
        one.advance(name, answer[start : start + 3])
        one.work()
    one.end(name)
    one.work()


def asked(one: Memory, prompt: Sequence[int], answer: Sequence[int], **given: object) -> list[int]:
    """What is proposed to a new request after this much."""
    one.begin("asked", prompt, **given)  # type: ignore[arg-type]
    one.advance("asked", answer)
    found = one.propose("asked", 8)
    one.end("asked")
    return found.tokens


def holds(one: Memory, tokens: Sequence[int]) -> bool:
    """Whether any array of it holds such a token."""
    waiting = [token_T for token_T, *_ in one._waiting]
    running = [request.token_T for request in one._requests.values()]
    running += [request.token_T for request, _ in one._leaving]
    at_hand = [one._shared.token_EN, one._own.token_EN, one._windows.token_SW]
    at_hand += [one._proposed.found_BK, one._found_K]
    return any(np.isin(tokens, array).any() for array in (*at_hand, *waiting, *running))


def contents(table: Table) -> dict[int, dict[int, int]]:
    """Key -> next token -> times."""
    entries = zip(table.key_E.tolist(), table.token_EN.tolist(), table.count_EN, strict=True)
    return {
        key: {token: int(num) for token, num in zip(tokens, counts, strict=True) if num}
        for key, tokens, counts in entries
        if key >= 0
    }


def test_an_answer_is_proposed_to_a_later_request() -> None:
    one = memory()
    served(one, "a", [1, 2], SECRET)
    assert asked(one, [7, 8], SECRET[:2]) == SECRET[2:]


def test_a_request_is_proposed_what_its_prompt_says() -> None:
    one = memory()
    one.begin("a", [5, 6, 7, 8, 9])
    one.advance("a", [3, 5, 6])
    assert one.propose("a", 3).tokens == [7, 8, 9]
    assert one.propose("a", 2).tokens == [7, 8]
    assert one.propose("a", 0).tokens == one.propose("nobody", 3).tokens == []


def test_a_prompt_is_not_proposed_to_others() -> None:
    one = memory()
    served(one, "a", [7, *SECRET], [1, 2, 3, 4])
    assert asked(one, [7], SECRET[:3]) == []


def test_who_has_another_scope_gets_nothing() -> None:
    one = memory()
    served(one, "a", [1], SECRET, scope="tenant a")
    assert asked(one, [2], SECRET[:2], scope="tenant b") == []
    assert asked(one, [2], SECRET[:2]) == []
    assert asked(one, [2], SECRET[:2], scope="tenant a") == SECRET[2:]


def test_a_request_that_is_not_kept_leaves_nothing() -> None:
    one = memory()
    served(one, "a", [1, *SECRET[:3]], SECRET[3:], is_kept=False)
    assert not holds(one, SECRET)
    assert asked(one, [1], SECRET[:2]) == []


def test_while_it_runs_it_is_proposed_its_own() -> None:
    one = memory()
    one.begin("a", [1, *SECRET], is_kept=False)
    one.advance("a", [4, *SECRET[:2]])
    assert one.propose("a", 3).tokens == SECRET[2:5]
    assert asked(one, [1], SECRET[:2]) == []


def test_after_a_purge_nothing_of_before_is_there_and_nothing_of_it_comes_back() -> None:
    one = memory()
    served(one, "before", [1], SECRET)
    one.begin("running", [2, 3], is_kept=True)
    one.advance("running", SECRET)
    one.clear()
    one.advance("running", [31, 32, 33, 34])
    one.end("running")
    one.work()
    assert not holds(one, SECRET)
    assert asked(one, [9], [31, 32]) == [33, 34]


def test_answers_of_before_are_remembered_without_their_prompts() -> None:
    one = memory()
    one.remember([([4, 5, 6, 7], SECRET)])
    one.work()
    assert one.num_waiting == 0
    assert asked(one, [4, 5, 6, 7], SECRET[:1]) == SECRET[1:]
    assert asked(one, [9], [4, 5]) == []


@pytest.mark.parametrize("kilobytes", [64, 256])
def test_its_size_is_what_was_given_however_much_is_served(kilobytes: int) -> None:
    one, rng = memory(kilobytes << 10), np.random.default_rng(0)
    for n in range(40):
        served(one, f"r{n}", rng.integers(0, 999, 50).tolist(), rng.integers(0, 999, 60).tolist())
    size = sum(array.nbytes for table in (one._shared, one._own) for array in table)
    assert 0.9 * (kilobytes << 10) <= size <= kilobytes << 10
    assert BYTES_PER_ENTRY * len(one._shared.key_E) < 0.8 * (kilobytes << 10)
    served(one, "last", [1], SECRET)
    assert asked(one, [2], SECRET[:2]) == SECRET[2:], "the newest is known"


def test_what_one_request_is_served_another_is_proposed_at_once() -> None:
    one = memory()
    one.begin("a", [1])
    one.advance("a", SECRET)
    assert asked(one, [9], SECRET[:2]) == SECRET[2:]


def test_long_earlier_answers_are_remembered_in_steps_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(module.TOKENS_PER_STEP, False, 10)
    one = memory()
    answer = list(range(100, 135))
    one.remember([([1], answer)])
    left = [one.num_waiting]
    while one.num_waiting:
        one.work()
        left.append(one.num_waiting)
    assert left == [35, 25, 15, 5, 0]
    assert asked(one, [1], answer[8:10]) == answer[10:18], "also over the seam of two steps"


def test_a_long_prompt_is_remembered_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.TOKENS_PER_STEP, False, 10)
    one = memory()
    one.begin("a", [*range(100, 125), 1])
    found = []
    for at in (114, 104, 108, 118):
        one.advance("a", [at, at + 1])
        found.append(one.propose("a", 2).tokens)
    assert found[0] == [] and found[-1] == [120, 121]


def test_only_so_much_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 8)
    one = memory()
    one.remember([([], [1, 2, 3, 4, 5, 6]), ([], SECRET)])
    assert one.num_waiting == len(SECRET)
    one.work()
    assert asked(one, [9], SECRET[:2]) == SECRET[2:] and asked(one, [9], [1, 2]) == []


def test_chances_are_learnt_where_nothing_is_proposed() -> None:
    """Text that never goes on as it did before is not proposed with confidence for long."""
    one, rng = memory(), np.random.default_rng(1)
    survival = []
    for n in range(30):
        one.begin(f"r{n}", [])
        for _ in range(40):
            found = one.propose(f"r{n}", 1)
            survival.append(float(found.survival_K[0]) if found.tokens else 0.0)
            one.advance(f"r{n}", [int(rng.integers(0, 5)), int(rng.integers(0, 5))])
            one.work()
        one.end(f"r{n}")
    assert max(survival[:60]) > 0.6
    assert np.mean(survival[-400:]) < 0.4


def test_the_prompts_of_many_requests_are_remembered_a_few_tokens_a_step_together() -> None:
    one = memory()
    names = [f"r{n}" for n in range(8)]
    for n, name in enumerate(names):
        one.begin(name, [10 * n + i % 5 for i in range(40)])
    known = []
    for _ in range(7):
        one.advance_all([(name, [1]) for name in names])
        known.append(sum(one._requests[name].num_own for name in names))
    steps = np.diff([0, *known[:4]])
    most = TOKENS_PER_STEP[False]
    assert most <= steps.min() and steps.max() <= most + len(names), "and what they are served"
    assert known[-1] == sum(one._requests[name].num_tokens for name in names)
    one.advance("r7", [70, 71])
    assert one.propose("r7", 3).tokens == [72, 73, 74]


@pytest.mark.parametrize("is_idle", [False, True])
def test_what_leaves_nothing_is_taken_out_a_few_tokens_a_step(is_idle: bool) -> None:
    """More where the engine is idle, whose memory is hardly asked for anything."""
    one, num_tokens = memory(), len(SECRET) * 60
    if not is_idle:
        one.begin("other", [1])
    one.begin("a", SECRET * 60, is_kept=False)
    while one._requests["a"].num_own < num_tokens:
        one.advance("a", [1])
        one.work()
    one.end("a")
    one.work()
    assert holds(one, SECRET[3:]) is not is_idle, "where others wait, it takes more than one step"
    for _ in range(num_tokens // TOKENS_PER_STEP[False]):
        one.work()
    assert not holds(one, SECRET) and contents(one._own) == {}


def test_however_many_leave_nothing_they_are_gone_soon_after() -> None:
    """An engine nothing of which is captured would hold ever more of what it served."""
    one = memory()
    one.begin("other", [1])
    for step in range(30):
        names = [f"{step} {n}" for n in range(16)]
        for name in names:
            one.begin(name, SECRET, is_kept=False)
        for some in (SECRET[:2], SECRET[2:]):
            one.advance_all([(name, some) for name in names])
        for name in names:
            one.end(name)
        one.work()
    for _ in range(2 * len(names) * len(SECRET) // TOKENS_PER_STEP[False]):
        one.work()
    assert not holds(one, SECRET) and contents(one._own) == {}


def test_what_is_still_taken_out_changes_nothing_for_those_who_come_next() -> None:
    """They would be proposed less, which tells that somebody was here who leaves nothing."""
    one, other = memory(), memory()
    for n in range(30):
        one.begin(f"{n}", SECRET, is_kept=False)
        one.advance(f"{n}", [1])
    for n in range(30):
        one.end(f"{n}")
    assert one._leaving, "not all of it is taken out at once"
    for each in (one, other):
        each.begin("next", [1, *SECRET], is_kept=False)
        each.advance("next", [4, *SECRET[:2]])
        assert each.propose("next", 3).tokens == SECRET[2:5]
        assert each._requests["next"].num_own == 1 + len(SECRET) + 3


def test_what_waits_is_forgotten_with_the_rest() -> None:
    """Answers that are not remembered yet, and requests of which not all is taken out."""
    one = memory()
    one.remember([([], SECRET * 60)])
    one.begin("a", SECRET * 60, is_kept=False)
    one.advance("a", [1])
    one.end("a")
    assert one.num_waiting
    one.clear()
    assert one.num_waiting == 0 and not holds(one, SECRET)
    one.work()
    assert contents(one._shared) == contents(one._own) == {}


def test_all_requests_of_a_step_at_once_are_as_one_after_another() -> None:
    """Of many requests, more than there is room for at first, some of which come and go or are not
    kept."""
    together, apart, rng = memory(1 << 25), memory(1 << 25), np.random.default_rng(4)
    together._num_per_step = apart._num_per_step = 1 << 20
    together._secret = apart._secret = b"the same for both"[:16]
    running: list[str] = []
    for number in range(120):
        if number < 60 and number % 2 == 0:
            name, prompt = f"r{number}", rng.integers(0, 6, 3 * number).tolist()
            for one in (together, apart):
                one.begin(name, prompt, scope=f"{number % 3}", is_kept=number % 10 > 0)
            running.append(name)
        if number > 60 and len(running) > 3:
            gone = running.pop(int(rng.integers(len(running))))
            together.end(gone)
            apart.end(gone)
        served = [(name, rng.integers(0, 6, int(rng.integers(0, 10))).tolist()) for name in running]
        together.advance_all(served, 8, 0.05)
        for name, tokens in served:
            apart.advance(name, tokens)
        for name in running:
            first, second = (one.propose(name, 8, 0.05) for one in (together, apart))
            assert first.tokens == second.tokens
            assert first.survival_K.tolist() == second.survival_K.tolist()
        for one in (together, apart):
            one.work()
    assert len(together._windows.num_S) > module.SLOTS
    assert contents(together._shared) == contents(apart._shared)
    assert contents(together._own) == contents(apart._own)
    assert (together._cells.right_C == apart._cells.right_C).all()
    assert together._cells.tried_C.sum() > 1000


def test_many_tokens_at_once_are_as_few_at_a_time() -> None:
    text, whole, parts = [*range(20, 60), *range(20, 40)], memory(k=3), memory(k=3)
    for one in (whole, parts):
        one.begin("a", [1, 2])
    whole.advance_all([("a", text)], 3, 0.05)
    for start in range(0, len(text), 2):
        parts.advance("a", text[start : start + 2])
    assert whole.propose("a", 3, 0.05).tokens == [40, 41, 42]
    assert parts.propose("a", 3, 0.05).tokens == [40, 41, 42]


def test_far_more_than_a_step_brings_is_remembered_in_steps() -> None:
    """As of an engine that was held for long: its next step would wait for all of it."""
    text, one, most = [*range(1000, 2000)], memory(1 << 22), TOKENS_PER_STEP[False]
    one.begin("a", [1, 2], is_kept=False)
    one.advance("a", [5, *text])
    assert one._requests["a"].num_own == most
    assert one._requests["a"].token_T[3 : 3 + len(text)].tolist() == text
    for _ in range(len(text) // most + 1):
        one.advance("a", [7])
    assert one._requests["a"].num_own == one._requests["a"].num_tokens
    one.advance("a", text[-12:-8])
    assert one.propose("a", 8).tokens == text[-8:]
    one.end("a")
    for _ in range(len(text) // most + 1):
        one.work()
    assert not holds(one, text) and contents(one._own) == {}


def test_a_long_answer_is_known_from_its_beginning_and_leaves_nothing() -> None:
    """Token by token, beyond the room that there was at first."""
    text, one = [*range(1000, 1700)], memory(1 << 22)
    one.begin("a", [1, 2], is_kept=False)
    for token in text:
        one.advance("a", [token])
    assert one._requests["a"].token_T[2 : 2 + len(text)].tolist() == text
    one.advance("a", text[:3])
    assert one.propose("a", 8).tokens == text[3:11]
    one.end("a")
    for _ in range(99):
        one.work()
    assert not holds(one, text)


def test_what_was_looked_up_for_all_holds_until_anything_changes() -> None:
    one = memory()
    served(one, "a", [1, 2], SECRET)
    for name in ("b", "c"):
        one.begin(name, [7])
    one.advance_all([("b", SECRET[:2]), ("c", SECRET[:3])], 8, 0.05)
    assert one.propose("b", 8, 0.05).tokens == SECRET[2:]
    assert one.propose("c", 8, 0.05).tokens == SECRET[3:]
    assert one.propose("b", 2, 0.05).tokens == SECRET[2:4], "another length"
    assert one.propose("b", 8, 1.0).tokens == [], "another chance"
    one.advance("c", SECRET[3:4])
    assert one.propose("c", 8, 0.05).tokens == SECRET[4:]
    one.clear()
    assert one.propose("b", 8, 0.05).tokens == [], "what was looked up is gone as well"


def test_as_many_are_looked_up_as_are_asked_for_and_the_others_when_they_are() -> None:
    one = memory()
    served(one, "a", [1, 2], SECRET)
    for name in ("b", "c"):
        one.begin(name, [7])
    one.advance_all([("b", SECRET[:2]), ("c", SECRET[:3])], 8, 0.05, 1)
    assert len(one._proposed.num_B) == 1
    assert one.propose("b", 8, 0.05).tokens == SECRET[2:]
    assert one.propose("c", 8, 0.05).tokens == SECRET[3:]


def test_what_was_looked_up_for_a_request_goes_with_it() -> None:
    one = memory()
    one.begin("a", [7, *SECRET], is_kept=False)
    one.advance_all([("a", SECRET[:2])], 8, 0.05)
    assert holds(one, SECRET) and one._proposed.num_B[0] > 0
    one.end("a")
    assert not holds(one, SECRET)


def test_a_repeated_name_goes_on_as_it_was() -> None:
    one = memory()
    one.begin("a", [1, 2, 3])
    one.begin("a", [9])
    one.advance("a", [7, 1, 2])
    assert one.propose("a", 1).tokens == [3]
    one.advance("nobody", [1])
    one.end("nobody")
