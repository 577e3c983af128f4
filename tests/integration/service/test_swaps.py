"""Swaps under traffic change no answer and fail no request."""

from __future__ import annotations

import numpy as np
import pytest

from osd.client.load import Answer
from osd.records import SwapReport
from osd.service.launch import Service
from tests.support.services import admin, current, records_of, wait_until
from tests.support.traffic import Traffic, ask, prompt_texts

pytestmark = pytest.mark.timeout(1200)


def test_twenty_swaps_under_traffic_change_nothing_and_fail_nothing(
    service: Service, learnt: list[Answer]
) -> None:
    newest = current(service).version
    prompts = prompt_texts(16, seed=2)
    before = [answer.token_ids for answer in ask(service.url, prompts)]
    num_before = len(swap_reports(service))
    with Traffic(service.url, prompts) as traffic:
        for i in range(20):
            version = newest if i % 2 else 1
            admin(service).admin("promote", version=version)
            num = num_before + i + 1
            wait_until(lambda num=num: len(swap_reports(service)) >= num, 60, f"swap {i}")
    reports = swap_reports(service)[num_before:]
    blocked_ms = [1000 * report.pause_s for report in reports]
    print(f"{len(reports)} swaps during {len(traffic.answers)} streams: blocked", end=" ")
    print(f"p50 {np.quantile(blocked_ms, 0.5):.1f} ms, p99 {np.quantile(blocked_ms, 0.99):.1f} ms")
    assert [report.version for report in reports] == [1, newest] * 10
    assert all(report.ok for report in reports)
    assert len(traffic.answers) > 20
    assert traffic.failed() == []
    changed = [a.index for a in traffic.answers if a.token_ids != before[a.index]]
    assert changed == []


def swap_reports(service: Service) -> list[SwapReport]:
    return records_of(service, SwapReport)
