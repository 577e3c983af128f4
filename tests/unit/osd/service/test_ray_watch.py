"""A service whose Ray has ended ends, with one line."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from osd.config import reading
from osd.errors import OSDError
from osd.service.launch import Service
from osd.service.ray_watch import SECONDS_UNTIL_GONE, RayWatch, connected


class Head:
    """The head of a cluster, and the time."""

    def __init__(self) -> None:
        self.now, self.is_up, self.asked = 1000.0, True, ""
        self.watch = RayWatch("[::1]:6380", clock=lambda: self.now, connect=self.connect)

    def connect(self, address: str) -> None:
        self.asked = address
        if not self.is_up:
            raise ConnectionRefusedError

    def look(self, after: float) -> bool:
        self.now += after
        return self.watch.is_gone()


def test_a_head_is_gone_when_nobody_answers_for_ten_seconds() -> None:
    head = Head()
    assert not head.look(3600) and head.asked == "[::1]:6380"
    head.is_up = False
    assert not head.look(SECONDS_UNTIL_GONE - 1)
    head.is_up = True
    assert not head.look(1), "it was back in time"
    head.is_up = False
    assert not head.look(SECONDS_UNTIL_GONE - 1)
    assert head.look(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_head_is_there_while_its_port_accepts_connections(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        server.listen()
        connected(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    with pytest.raises(OSError):
        connected(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class Supervised(Service):
    """A service that is there, and its supervisor."""

    def __init__(self, watch: Any, address: str) -> None:
        overrides = [f"ray.address={address}"]
        self.config = reading.load(overrides=overrides, environ={}).config
        self._stack, self._valkey, self._ray_watch = ExitStack(), None, watch


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("local", "the private Ray of this service has ended, and all its parts"),
        ("head:6380", "ray.address=head:6380: that Ray cluster has ended, and the service's"),
    ],
)
def test_a_service_does_not_outlive_its_ray(address: str, says: str) -> None:
    head = Head()
    head.is_up = False
    head.now += SECONDS_UNTIL_GONE
    with pytest.raises(OSDError) as caught:
        Supervised(head.watch, address).supervise(threading.Event())
    assert str(caught.value).startswith(says) and str(caught.value).endswith("serve again")
