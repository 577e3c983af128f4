"""A real Prometheus with the example's rules and jobs, at short intervals."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support import promtool
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs" / "prometheus"
SECONDS = 120.0
"""Longest wait for anything; on an idle machine each takes a few."""


class Prometheus:
    """Its HTTP API."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=f"http://{address}", timeout=30)

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = self._client.get("/api/v1/query", params={"query": expression})
        return list(answer.raise_for_status().json()["data"]["result"])

    def firing(self) -> dict[str, dict[str, Any]]:
        """Name -> alert, of those that fire.

        The alert of a missed scrape is left out: it fires on a busy machine.
        """
        alerts = self._client.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        found = {
            alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"
        }
        return {name: alert for name, alert in found.items() if name != "OsdControlAway"}

    def health_of_rules(self) -> set[str]:
        groups = self._client.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}


@contextmanager
def scraping(addresses: Mapping[str, str], directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes job -> address, for jobs of the example.

    It looks twice a second, and waits 2 seconds before an alert fires.
    """
    program = promtool.program("prometheus")
    rules = re.sub(r"(?m)^( *for:) \w+$", r"\1 2s", (CONFIGS / "alerts.yaml").read_text())
    assert rules.count("for: 2s") == rules.count("- alert:")
    (directory / "alerts.yaml").write_text(rules)
    config = yaml.safe_load((CONFIGS / "prometheus.yaml").read_text())
    config["global"] = {
        "scrape_interval": "500ms",
        "scrape_timeout": "500ms",
        "evaluation_interval": "500ms",
    }
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    config["scrape_configs"] = [
        jobs[name] | {"static_configs": [{"targets": [at]}]} for name, at in addresses.items()
    ]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = [
        program,
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        prometheus = Prometheus(address)
        wait_until(lambda: process.poll() is not None or prometheus.is_ready(), "it starts")
        assert process.poll() is None, (directory / "log").read_text()
        yield prometheus
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.1)
