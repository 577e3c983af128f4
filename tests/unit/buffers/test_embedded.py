"""A private server that cannot be started: it ends nothing else, and is tried again."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest

from buffers import embedded
from buffers.embedded import EmbeddedValkey
from osd.common.backoff import Backoff
from osd.errors import ReplayBufferError


@pytest.mark.parametrize("name", ["valkey.conf", "valkey.log", "lock", "password"])
def test_a_file_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    server = EmbeddedValkey(tmp_path, program=Path("/bin/false"), keeps_password=True)
    for attempt in (server.start, server.restart):
        with pytest.raises(ReplayBufferError, match=rf"does not start: {tmp_path}/{name}: \S+"):
            attempt()
    (tmp_path / name).rmdir()
    with pytest.raises(ReplayBufferError, match="it ended without a word"):
        server.start()


def test_a_server_that_stays_dead_is_told_of_once_and_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, tried = 0.0, []
    monkeypatch.setattr(embedded, "Backoff", partial(Backoff, clock=lambda: now))
    server = EmbeddedValkey(tmp_path)
    is_disk_full = True

    def restart() -> None:
        tried.append(now)
        if is_disk_full:
            raise ReplayBufferError("no space left")

    monkeypatch.setattr(server, "restart", restart)
    with caplog.at_level(logging.WARNING):
        for second in range(100):
            now = float(second)
            server.keep_alive()
        assert tried == [0, 1, 2, 4, 8, 16, 32, 62, 92]
        is_disk_full, now = False, 122.0
        server.keep_alive()
        monkeypatch.setattr(server, "is_alive", lambda: True)
        now = 200.0
        server.keep_alive()
    assert tried[-1] == 122
    assert [record.getMessage() for record in caplog.records] == [
        "the private Valkey died and is started again",
        "no space left; trying again until it works",
        "the private Valkey is there again",
    ]
