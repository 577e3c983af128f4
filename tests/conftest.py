"""A run's time: where it is over ($TEST_DEADLINE, seconds since 1970) no test begins any more: the
run has failed."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.browser import browser, visit

__all__ = ["browser", "visit"]

DEADLINE = float(os.environ.get("TEST_DEADLINE") or "inf")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > DEADLINE:
        item.session.shouldfail = (
            "the time of this run (TEST_DEADLINE) is over: the tests that are left were not run"
        )
        pytest.fail(item.session.shouldfail, pytrace=False)
