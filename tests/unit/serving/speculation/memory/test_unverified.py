"""Drafts that nobody verified: what is known of them by what was served."""

from __future__ import annotations

from serving.speculation.memory.unverified import Judged, Unverified

PROMPT = [1, 2, 3]


def judged(num_drafted: int, num_accepted: int, at: int = 3, step: int = 7) -> Judged:
    """Of a draft of "a" behind so many tokens, three of which are its prompt."""
    return Judged("a", step, at, at - 3, num_drafted, num_accepted, 1.5)


def with_draft(*draft: int) -> Unverified:
    """Proposed behind the prompt in step 7."""
    unverified = Unverified()
    unverified.add("a", 7, 3, 0, list(draft), 1.5)
    return unverified


def test_a_draft_that_was_served_whole_was_right() -> None:
    assert with_draft(4, 5).served("a", [*PROMPT, 4, 5, 9]) == [judged(2, 2)]


def test_a_draft_is_right_up_to_the_first_token_that_differs() -> None:
    """What it says behind that shows nothing, even where it was served."""
    assert with_draft(4, 5, 6).served("a", [*PROMPT, 4, 8, 6]) == [judged(3, 1)]
    assert with_draft(4, 5, 6).served("a", [*PROMPT, 8]) == [judged(3, 0)]


def test_a_draft_is_open_until_it_is_known_and_judged_once() -> None:
    unverified = with_draft(4, 5, 6)
    assert unverified.served("a", PROMPT) == []
    assert unverified.served("a", [*PROMPT, 4]) == []
    assert unverified.served("a", [*PROMPT, 4, 5]) == []
    assert unverified.served("a", [*PROMPT, 4, 5, 6]) == [judged(3, 3)]
    assert unverified.served("a", [*PROMPT, 4, 5, 6, 7]) == []


def test_drafts_of_several_steps_are_open_at_once() -> None:
    unverified = with_draft(4, 5, 6)
    assert unverified.served("a", [*PROMPT, 4]) == []
    unverified.add("a", 8, 4, 1, [9, 9], 1.5)
    unverified.add("a", 9, 4, 1, [5, 6], 1.5)
    assert unverified.served("a", [*PROMPT, 4, 5]) == [judged(2, 0, at=4, step=8)]
    assert unverified.served("a", [*PROMPT, 4, 5, 6]) == [
        judged(3, 3),
        judged(2, 2, at=4, step=9),
    ]


def test_requests_are_told_apart() -> None:
    unverified = with_draft(4)
    unverified.add("b", 7, 1, 0, [4])
    assert unverified.served("b", [1, 5]) == [Judged("b", 7, 1, 0, 1, 0, 0.0)]
    assert unverified.served("unknown", [1, 5]) == []
    assert unverified.served("a", [*PROMPT, 4]) == [judged(1, 1)]


def test_at_the_end_counts_what_was_served_in_its_place() -> None:
    """Nobody knows what an answer would have gone on with."""
    unverified = with_draft(4, 5, 6)
    unverified.served("a", [*PROMPT, 4, 5])
    unverified.add("a", 8, 5, 2, [7])
    assert unverified.end("a") == [judged(2, 2)]
    assert unverified.end("a") == []
    assert unverified.served("a", [*PROMPT, 4, 5, 7]) == []


def test_no_draft_is_nothing_to_judge() -> None:
    unverified = with_draft()
    assert unverified.served("a", [*PROMPT, 4]) == unverified.end("a") == []


def test_a_draft_of_before_is_not_judged_when_another_serves() -> None:
    unverified = with_draft(4)
    unverified.clear()
    assert unverified.served("a", [*PROMPT, 4]) == []
