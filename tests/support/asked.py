"""The plugin of a pytest that runs a test whenever another pytest asks for it (`elsewhere.py`)."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

CHANNEL = "OSD_TEST_CHANNEL"
"""The file descriptor at which it is asked."""


def key(item: pytest.Item) -> tuple[str, str]:
    """The test's name here and there: node ids differ, where tests are spread over processes."""
    return str(item.path), item.name


def pytest_configure(config: pytest.Config) -> None:
    connection = Connection(int(os.environ[CHANNEL]))
    config.pluginmanager.register(Asked(config, connection))


class Asked:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Until the other end is closed: receive a test and the one that follows it, answer with
        reports, then None."""
        items = {key(item): item for item in session.items}
        while True:
            try:
                asked, following = self._connection.recv()
            except EOFError:
                return True
            item = items[asked]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
            self._connection.send(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(data)
