"""Tests that begin after $TEST_DEADLINE are skipped and counted: a slow machine's run, too, ends with a verdict."""

from __future__ import annotations

import os
import time

import pytest

from tests.browser import browser, visit

__all__ = ["browser", "visit"]

DEADLINE = float(os.environ.get("TEST_DEADLINE") or "inf")  # seconds since the epoch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > DEADLINE:
        pytest.skip("this run's time is used up (TEST_DEADLINE)")
