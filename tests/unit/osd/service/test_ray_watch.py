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
from osd.service.ray_watch import (
    HEAD,
    HERE,
    SECONDS_UNTIL_GONE,
    RayWatch,
    connected,
    patience,
)


class Ray:
    """The head of a cluster, Ray on this machine, and the time."""

    def __init__(self, patience_s: float = SECONDS_UNTIL_GONE) -> None:
        self.now = 1000.0
        self.away: set[str] = set()
        self.watch = RayWatch(
            "[::1]:6380", "[::1]:7000", patience_s, clock=self.clock, connect=self.connect
        )

    def clock(self) -> float:
        self.now += 1e-6  # it never stands still
        return self.now

    def connect(self, address: str) -> None:
        assert address in ("[::1]:6380", "[::1]:7000")
        if address in self.away:
            raise ConnectionRefusedError

    def look(self, after: float) -> str:
        self.now += after
        return self.watch.what_is_gone()


@pytest.mark.parametrize(("address", "what"), [("[::1]:6380", HEAD), ("[::1]:7000", HERE)])
def test_what_answers_nobody_for_ten_seconds_is_gone(address: str, what: str) -> None:
    ray = Ray()
    assert not ray.look(3600)
    ray.away = {address}
    assert not ray.look(SECONDS_UNTIL_GONE - 1)
    assert ray.watch.is_head_away is (what == HEAD)
    ray.away = set()
    assert not ray.look(1) and not ray.watch.is_head_away, "it was back in time"
    ray.away = {address}
    assert not ray.look(SECONDS_UNTIL_GONE - 1)
    assert ray.look(1) == what


def test_a_joined_cluster_is_given_as_long_for_its_head_as_ray_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Less what it takes to end before Ray ends this process."""
    ray = Ray(patience({}))
    ray.away = {"[::1]:6380"}
    assert not ray.look(39)
    ray.away = set()
    assert not ray.look(1)
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("Ray's head is away: requests are answered")
    assert said[1] == "Ray's head is back"
    ray.away = {"[::1]:6380"}
    assert not ray.look(39)
    assert ray.look(1) == HEAD
    assert patience({"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}) == 580
    assert patience({"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}) == SECONDS_UNTIL_GONE
    assert patience({"RAY_gcs_rpc_server_reconnect_timeout_s": "60s"}) == patience({})


def test_a_head_that_is_back_does_not_bring_this_machines_ray_back() -> None:
    """As where all of a head's processes are started again: the service's are gone."""
    ray = Ray(patience({}))
    ray.away = {"[::1]:6380", "[::1]:7000"}
    assert not ray.look(5)
    ray.away = {"[::1]:7000"}
    assert ray.look(5) == HERE


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
    ("address", "away", "says"),
    [
        ("local", "[::1]:6380", "the private Ray of this service has ended, and all its parts"),
        ("local", "[::1]:7000", "the private Ray of this service has ended, and all its parts"),
        ("head:6380", "[::1]:6380", "ray.address=head:6380: that Ray cluster has ended, and"),
        ("head:6380", "[::1]:7000", "ray.address=head:6380: Ray has ended on this machine, and"),
    ],
)
def test_a_service_does_not_outlive_its_ray(address: str, away: str, says: str) -> None:
    ray = Ray()
    ray.away = {away}
    ray.now += SECONDS_UNTIL_GONE
    with pytest.raises(OSDError) as caught:
        Supervised(ray.watch, address).supervise(threading.Event())
    assert str(caught.value).startswith(says) and str(caught.value).endswith("serve again")


def test_while_the_head_is_away_engines_are_left_alone() -> None:
    """Ray would neither start nor end one."""
    ray, stop, looks = Ray(60), threading.Event(), []
    ray.away = {"[::1]:6380"}
    ray.now += 1
    service = Supervised(ray.watch, "head:6380")
    service._look_after_fleet = lambda: looks.append(ray.now)  # type: ignore[method-assign]
    threading.Timer(1.7, stop.set).start()
    service.supervise(stop)
    assert looks == []
    ray.away = set()
    stop.clear()
    threading.Timer(1.7, stop.set).start()
    service.supervise(stop)
    assert looks
