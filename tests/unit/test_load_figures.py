"""What a client makes of answers: k per step, also where the last step accepted more than was served."""

from __future__ import annotations

import pytest

from osd.load import Answer, figures


def answer(num_tokens: int, histogram: tuple[int, ...], drafted: int) -> Answer:
    return Answer(
        index=0, ok=True, token_ids=(1,) * num_tokens, histogram=histogram, num_draft_tokens=drafted, seconds=1.0
    )


def test_k_counts_the_steps_without_drafts() -> None:
    """A first token, two drafts of 4 with 2 and 0 accepted, and six steps without any."""
    assert figures([answer(1 + 3 + 1 + 6, (1, 0, 1, 0, 0), 8)]).k == pytest.approx(8 / 9)


def test_k_is_never_more_than_was_drafted_in_a_step() -> None:
    """Three drafts of 4, all accepted, of which the last four tokens were cut off."""
    assert figures([answer(12, (0, 0, 0, 0, 3), 12)]).k == 4.0


def test_without_speculation_k_is_nothing() -> None:
    assert figures([answer(10, (), 0)]).k == 0.0
    assert figures([]).k is None
