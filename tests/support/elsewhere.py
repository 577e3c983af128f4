"""Tests that need a process of their own: another pytest, which runs one test whenever it is asked.

    this pytest ──(file, test, next test)──► the other, with another environment
                ◄─────── its reports ───────

A test has the same name, reports and fixtures there as here, and what lives for a session lives
there as long as this session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from typing import Any

import pytest

from tests.support.asked import CHANNEL, key


class Elsewhere:
    """A pytest of its own, which collects `folder` and starts with the first test."""

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        here, there = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._connection = here
        ours = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        plugins = ("-p", "tests.support.asked", "-p", "no:cacheprovider")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *plugins, folder],
            env={**ours, **environment, CHANNEL: str(there.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[there.fileno()],
        )
        there.close()

    def run(self, item: pytest.Item, following: pytest.Item | None) -> Iterator[Any]:
        """The test's reports, as they come."""
        asked = (key(item), key(following) if following is not None else None)
        try:
            self._connection.send(asked)
            while (data := self._connection.recv()) is not None:
                report = item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=data
                )
                report.nodeid = item.nodeid
                yield report
        except (EOFError, OSError, pytest.fail.Exception) as error:
            if isinstance(error, pytest.fail.Exception):  # the test's time is over
                self._process.kill()
            code = self._process.wait()
            self._output.seek(0)
            said = self._output.read()[-4000:].decode(errors="replace")
            yield failure(item, f"{error}\nthe process of this test ended with {code}:\n{said}")

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
        self._output.close()


def failure(item: pytest.Item, text: str) -> pytest.TestReport:
    def fail() -> None:
        pytest.fail(text, pytrace=False)

    return pytest.TestReport.from_item_and_call(item, pytest.CallInfo.from_call(fail, "call"))


def run_elsewhere(
    item: pytest.Item, following: pytest.Item | None, start: Callable[[], Elsewhere]
) -> None:
    """What pytest does to run a test, with the reports of another process."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in start().run(item, following):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
