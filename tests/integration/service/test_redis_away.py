"""Requests do not notice that Redis dies, hangs, is full or refuses its clients; an alert does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from osd.client.load import Answer
from osd.service.launch import Service
from tests.support.processes import kill
from tests.support.prometheus import scraping
from tests.support.services import num_stored, status, wait_until
from tests.support.traffic import PROMPTS, Traffic, ask

pytestmark = pytest.mark.timeout(1200)


def test_requests_do_not_notice_that_valkey_died(service: Service) -> None:
    def server_pid() -> int:
        client = redis.Redis.from_url(service.redis_url, protocol=2)
        with suppress(redis.RedisError), client:
            return int(client.info("server")["process_id"])
        return 0

    before = num_put(service)
    first = server_pid()
    with Traffic(service.url, PROMPTS) as traffic:
        wait_until(lambda: traffic.answers, 60, "answers before")
        kill(first)
        clock = time.monotonic()
        wait_until(lambda: server_pid() not in (0, first), 60, "Valkey is back")
        print(f"Valkey killed and back after {time.monotonic() - clock:.1f} s")
        put = wait_until(lambda: num_put(service), 30, "stats")
        assert put >= before - 24, "what was stored is there again, but for the last second"
        wait_until(lambda: num_put(service) > put, 30, "capture goes on")
    assert traffic.failed() == []
    wait_until(lambda: is_redis_ok(service), 30, "the control plane is content")


def num_put(service: Service) -> int:
    """Traces ever stored, as the control port says now; 0 while it does not know."""
    return int((status(service.control_url).get("buffer") or {}).get("num_put", 0))


def is_redis_ok(service: Service) -> bool:
    return bool(status(service.control_url)["redis"] == "ok")


@contextmanager
def hanging(server: redis.Redis) -> Iterator[None]:
    pid = int(server.info("server")["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def full(server: redis.Redis) -> Iterator[None]:
    before = server.config_get("maxmemory*")
    server.config_set("maxmemory-policy", "noeviction")
    server.config_set("maxmemory", 1)
    try:
        yield
    finally:
        for name in ("maxmemory", "maxmemory-policy"):
            server.config_set(name, before[name])


@contextmanager
def locked(server: redis.Redis) -> Iterator[None]:
    password = server.config_get("requirepass")["requirepass"]
    server.config_set("requirepass", "another")
    server.client_kill_filter(_type="normal", skipme=True)
    try:
        yield
    finally:
        server.config_set("requirepass", password)


@pytest.mark.parametrize("trouble", [hanging, full, locked])
def test_requests_do_not_notice_trouble_with_the_buffer(service: Service, trouble: Any) -> None:
    """The server answers nobody, takes nothing, or lets nobody in.

    This lasts for forty-eight requests and at least three seconds: longer than the capture thread
    waits for the server."""
    server = redis.Redis.from_url(service.redis_url, protocol=2, decode_responses=True)
    usual = {(answer.index, answer.text) for answer in ask(service.url, PROMPTS, max_tokens=20)}
    put = num_stored(service.control_url)
    with Traffic(service.url, PROMPTS, max_tokens=20) as traffic:

        def seconds_for(num: int) -> float:
            """How long so many more requests of the traffic take."""
            wanted, started = len(traffic.answers) + num, time.monotonic()
            wait_until(lambda: len(traffic.answers) >= wanted, 120, "requests are answered")
            return time.monotonic() - started

        seconds_for(12)  # the first round
        calm = seconds_for(48)
        with trouble(server):
            since = time.monotonic()
            troubled = seconds_for(48)
            wait_until(lambda: time.monotonic() - since > 3, 10, "three seconds are over")
        print(f"48 requests: {calm:.1f} s while all was well, {troubled:.1f} s in trouble")
        assert troubled < 2 * calm, "requests wait for nothing"
        wait_until(lambda: num_put(service) > put, 60, "it goes on")
    answers = {(answer.index, answer.text) for answer in traffic.answers}
    assert answers == usual, "nobody got another answer, or none"
    wait_until(lambda: is_redis_ok(service), 60, "the control plane is content")
    server.close()


def test_prometheus_scrapes_it_and_alerts_when_redis_hangs(
    service: Service, learnt: list[Answer], tmp_path: Path
) -> None:
    """The example's jobs and rules; nothing fires while all is well."""
    jobs = {"osd": service.control_url, "vllm": service.url}
    addresses = {job: url.removeprefix("http://") for job, url in jobs.items()}
    queries = (
        "sum(up) == 2",
        "sum(rate(vllm:spec_decode_num_accepted_tokens_total[10s])) > 0",
        "sum(rate(osd_spec_accepted_tokens_total[10s])) > 0 and on () osd_redis_up == 1",
    )
    server = redis.Redis.from_url(service.redis_url, protocol=2, decode_responses=True)
    with scraping(addresses, tmp_path) as prometheus, Traffic(service.url, PROMPTS) as traffic:
        for query in queries:
            wait_until(lambda query=query: prometheus.query(query), 60, query)
        wait_until(lambda: prometheus.health_of_rules() == {"ok"}, 60, "every rule was evaluated")
        assert prometheus.firing() == {}
        with hanging(server):
            wait_until(lambda: {*prometheus.firing()} == {"OsdRedisAway"}, 60, "the alert fires")
        wait_until(lambda: prometheus.firing() == {}, 60, "it is over")
    assert traffic.failed() == []
    server.close()
