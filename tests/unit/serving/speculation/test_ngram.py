"""Prompt lookup on token lists short enough to follow by hand."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from serving.speculation.ngram import MAX_INDEXED, SIZES, STEPS_PER_SHADOW, Lookup, Shadow


def ids(text: str) -> list[int]:
    return [string.ascii_lowercase.index(letter) for letter in text]


def proposed(text: str, k: int) -> str:
    return "".join(string.ascii_lowercase[i] for i in Lookup().propose(ids(text), k))


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert proposed("xabcdefyab", 3) == "cde"
    assert proposed("xabcdefyab", 1) == "c"


def test_the_longest_suffix_wins_over_a_later_but_shorter_one() -> None:
    # "abcd" was followed by "m", and "cd" alone, later, by "n".
    assert proposed("abcdmxcdnyabcd", 1) == "m"
    assert proposed("abcdmxcdnyzzcd", 1) == "n"


def test_the_latest_of_equal_places_wins() -> None:
    assert proposed("abmxabnyab", 1) == "n"
    assert proposed("abcdmxabcdnyabcd", 1) == "n"


def test_the_last_tokens_do_not_find_themselves() -> None:
    assert proposed("abcdefgh", 3) == ""
    assert proposed("abab", 3) == "aba"


def test_nothing_is_proposed_where_nothing_is_known_or_wanted() -> None:
    assert proposed("", 3) == proposed("a", 3) == proposed("ab", 3) == ""
    assert proposed("xabcdyab", 0) == proposed("xabcdyab", -1) == ""


def test_a_proposal_that_reaches_the_end_goes_on_as_the_loop_it_is_in() -> None:
    assert proposed("abcab", 5) == "cabca"
    assert proposed("xaaaa", 3) == "aaa"


def test_a_lookup_follows_a_growing_output() -> None:
    lookup, tokens = Lookup(), ids("thecat")
    assert lookup.propose(tokens, 2) == []
    tokens += ids("ate")
    assert lookup.propose(tokens, 2) == []
    tokens += ids("theca")
    assert lookup.propose(tokens, 2) == ids("ta")
    tokens += ids("xca")
    assert lookup.propose(tokens, 2) == ids("xc"), (
        "the newest place of `ca` is the one just written"
    )


@pytest.mark.parametrize("num_parts", [2, 4])
def test_a_long_prompt_is_indexed_in_parts_to_the_same_end(num_parts: int) -> None:
    rng = random.Random(num_parts)
    tokens = [rng.randrange(30) for _ in range(num_parts * MAX_INDEXED - 7)]
    lookup, at_once = Lookup(), Lookup()
    done = [lookup.index(tokens) for _ in range(num_parts)]
    assert done == [False] * (num_parts - 1) + [True]
    for end in range(0, len(tokens) + 1, MAX_INDEXED // 2):
        at_once.index(tokens[:end])
    at_once.index(tokens)
    assert lookup._ends == at_once._ends
    assert lookup.propose(tokens, 4) == at_once.propose(tokens, 4) != []


def test_nothing_is_proposed_before_a_prompt_is_indexed_to_its_end() -> None:
    tokens = [1, 2, 3, 4] + list(range(100, 100 + MAX_INDEXED)) + [9, 1, 2]
    lookup = Lookup()
    assert lookup.propose(tokens, 2) == []
    assert lookup.propose(tokens, 2) == [3, 4]


class Watched(list[int]):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, item: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(item)


def test_what_is_indexed_is_not_read_again() -> None:
    lookup, tokens = Lookup(), Watched(range(500))
    lookup.propose(tokens, 3)
    assert tokens.num_reads > 500
    tokens.num_reads = 0
    tokens.append(7)
    lookup.propose(tokens, 3)
    assert tokens.num_reads <= 2 * len(SIZES)


def test_lookups_agree_with_a_search_from_the_end() -> None:
    rng = random.Random(0)
    tokens: list[int] = []
    lookup, num_found = Lookup(), 0
    for _ in range(400):
        tokens.append(rng.randrange(6))
        found = lookup.propose(tokens, 3)
        assert found == searched(tokens, 3)
        num_found += bool(found)
    assert num_found > 200


def searched(tokens: list[int], k: int) -> list[int]:
    """What `Lookup` is meant to find, without an index."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                loop = tokens[end:]
                return [loop[i % len(loop)] for i in range(k)]
    return []


# -- in shadow ------------------------------------------------------------------------------------


def judgements(before: str, written: str, k: int = 3) -> list[tuple[int, int]]:
    """What lookups in shadow show while the target writes a letter a step."""
    lookup, shadow, found = Lookup(), Shadow(), []
    for end in range(len(written) + 1):
        tokens = ids(before + written[:end])
        if (judged := shadow.step(lookup, lambda tokens=tokens: tokens, k)) is not None:
            found.append(judged)
    return found


@pytest.mark.parametrize(
    ("before", "written", "expected"),
    [
        # At the eighth step "ab" has come back, and "cde" after it.
        ("abcdefgh", "zzzzzab" + "cde", [(3, 3)]),
        ("abcdefgh", "zzzzzab" + "cdx", [(3, 2)]),
        ("abcdefgh", "zzzzzab" + "x", [(3, 0)]),  # one letter suffices to refuse it
        ("abcdefgh", "zzzzzab" + "cd", []),  # as yet nothing is wrong
        ("abcdefgh", "stuvwxy" + "z", [(1, 0)]),  # nothing was found: a draft that was not accepted
        # The next one comes eight steps later.
        ("abcdefgh", "zzzzzab" + "x" + "stuvwxyzqrstuvw", [(3, 0), (1, 0)]),
    ],
)
def test_a_lookup_in_shadow_is_judged_by_what_was_written(
    before: str, written: str, expected: list[tuple[int, int]]
) -> None:
    assert STEPS_PER_SHADOW == 8
    assert judgements(before, written) == expected
