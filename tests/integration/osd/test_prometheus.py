"""A real Prometheus scrapes a history over HTTP, and its alerts come and go with their causes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from osd.observe.history import History
from osd.records import Health, SpecWindow
from tests.support.prometheus import SECONDS, Prometheus, scraping, wait_until
from tests.unit.osd.observe.test_history import status, window


class Service:
    """A control port that answers nothing but `/metrics`, of a history that the test writes."""

    def __init__(self) -> None:
        self.history = history = History()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = history.prometheus().encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.look()

    def look(self, lagging: tuple[str, ...] = ()) -> None:
        """What the controller tells the history at each look."""
        self.history.observe([status()], None)
        self.history.observe_health(
            Health(is_redis_up=True, is_trainer_up=True, is_alarmed=False, lagging=lagging)
        )

    def serve(self, window: SpecWindow, seconds: float, until: Callable[[], bool]) -> None:
        """Such windows, ten a second, until something is so."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "it never came"
            self.history.add(window)
            time.sleep(0.1)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[Prometheus]:
    with scraping({"osd": service.address}, tmp_path) as prometheus:
        yield prometheus


def test_alerts_come_and_go_with_what_is_wrong(service: Service, prometheus: Prometheus) -> None:
    good = window(0.0)
    dead = window(
        0.0, num_accepted_tokens=0, num_accepted_tokens_per_pos=(0, 0), num_tested_per_pos=(100, 0)
    )
    wait_until(lambda: bool(prometheus.query('up{job="osd"} == 1')), "the control port is scraped")
    wait_until(lambda: prometheus.health_of_rules() == {"ok"}, "every rule was evaluated")
    assert prometheus.firing() == {}

    service.look(lagging=("replica-0",))
    service.serve(
        dead,
        SECONDS,
        lambda: {*prometheus.firing()} == {"OsdReplicaLagging", "OsdDraftSilentlyDead"},
    )
    lagging, silent = (
        prometheus.firing()[name] for name in ("OsdReplicaLagging", "OsdDraftSilentlyDead")
    )
    assert lagging["annotations"]["summary"] == f"replica-0 of {service.address} is lagging"
    assert "`osd drafts promote 1`" in lagging["annotations"]["description"]
    assert "0% were accepted" in silent["annotations"]["description"], (
        "a draft that was never accepted has an α as well"
    )
    waited = prometheus.query(
        'count by (alertname) (max_over_time(ALERTS{alertstate="pending"}[5m]))'
    )
    assert {alert["metric"]["alertname"] for alert in waited} >= {*prometheus.firing()}, (
        "they were pending first"
    )

    service.look()
    wait_until(lambda: {*prometheus.firing()} == {"OsdDraftSilentlyDead"}, "the replica caught up")
    service.serve(good, SECONDS, lambda: prometheus.firing() == {})
