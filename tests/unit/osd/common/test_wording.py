"""Times as people write them."""

from __future__ import annotations

from datetime import datetime

import pytest

from osd.common.wording import moment
from osd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "ago"),
    [("7d", 7 * 86_400), ("12h", 12 * 3600), (" 30 min ", 1800), ("0d", 0), ("1d", 86_400)],
)
def test_an_age_is_so_long_ago(text: str, ago: float) -> None:
    assert moment(text, now=1.7e9) == 1.7e9 - ago


def test_a_date_is_local_unless_it_says_otherwise() -> None:
    assert moment("2026-11-02") == datetime(2026, 11, 2).timestamp()
    assert moment("2026-11-02T08:30") == datetime(2026, 11, 2, 8, 30).timestamp()
    assert moment("2026-11-02T08:30+00:00") == 1793608200.0


@pytest.mark.parametrize(
    "text", ["", "soon", "7", "7 weeks", "-3d", "99999999d", "2026-13-01", "0000-01-01"]
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        ConfigError, match="is no time: give a date like 2026-11-02, or an age like 7d"
    ) as caught:
        moment(text)
    assert "\n" not in str(caught.value)
