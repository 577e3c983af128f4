"""What is told of the errors of others."""

from __future__ import annotations

import pytest

from osd.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file"), "no such file"),
        (ValueError("\n  what is wrong\nand all that led there\n"), "what is wrong"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_it_is_one_line_and_says_something(error: Exception, line: str) -> None:
    assert first_line(error) == line
