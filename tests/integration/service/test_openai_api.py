"""The service answers as vLLM's own OpenAI API does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from osd.service.launch import Service
from serving.vllm.undrafted import REFUSED
from tests.support.services import status, wait_until
from tests.support.traffic import MODEL, PROMPTS, ask

pytestmark = pytest.mark.timeout(1200)


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
    assert chat.usage is not None
    assert (chat.usage.completion_tokens, chat.usage.prompt_tokens) == (20, 10)
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
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_what_vllm_refuses_beside_a_draft_is_answered(
    service: Service, client: openai.OpenAI
) -> None:
    """Beside a request for `logprobs`: with vLLM's rejection sampler as it comes, one for
    `logprob_token_ids` would end the engine."""

    def ask_with(**extra: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=messages(PROMPTS[0]),
            temperature=0,
            logprobs=True,
            extra_body={"max_tokens": 12, "ignore_eos": True, "return_token_ids": True} | extra,
        ).choices[0]

    as_ever = ask_with()
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(ask_with, max_tokens=200)
        while not beside.done():
            forced = ask_with(logit_bias={"9": 100})
            assert forced.token_ids == [9] * 12
            chosen = ask_with(logprob_token_ids=[3, 4], top_logprobs=2)
            assert chosen.token_ids == as_ever.token_ids
            assert len(chosen.logprobs.content) == 12
            hot = [ask_with(min_p=0.05, temperature=1.5, seed=7).token_ids for _ in range(2)]
            assert hot[0] == hot[1] != as_ever.token_ids
        assert beside.result().token_ids[:12] == as_ever.token_ids
        assert len(beside.result().logprobs.content) == 200

    def counted() -> bool:
        report = status(service.control_url)["replicas"][0]["speculation"]
        return bool(min(report["undrafted"].get(reason, 0) for reason in REFUSED) > 0)

    wait_until(counted, 30, "the report counts them by reason")


def test_stop_ends_an_answer_before_the_word(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": MODEL, "messages": messages(PROMPTS[2])}
    common |= {"max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**common).choices[0].message.content or ""
    word = whole.split()[5]
    cut = client.chat.completions.create(stop=[word], **common).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(word)]


def test_clients_that_leave_mid_stream_disturb_nobody(
    service: Service, client: openai.OpenAI
) -> None:
    reference = [answer.token_ids for answer in ask(service.url, PROMPTS[:4])]
    url = f"{service.url}/v1/chat/completions"
    body = {"model": MODEL, "messages": messages(PROMPTS[3]), "max_tokens": 200}
    body |= {"stream": True, "ignore_eos": True}
    for _ in range(5):
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            assert next(response.iter_lines()).startswith("data: ")
    assert [answer.token_ids for answer in ask(service.url, PROMPTS[:4])] == reference

    def is_idle() -> bool:
        return bool(status(service.control_url)["replicas"][0]["num_running"] == 0)

    wait_until(is_idle, 30, "nothing runs any more")


def test_health_and_metrics(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert "vllm:spec_decode_num_accepted_tokens_total" in httpx.get(f"{service.url}/metrics").text
    ours = httpx.get(f"{service.control_url}/metrics").text
    for name in ("spec_draft_tokens_total", "swap_total", "buffer_traces", "draft_info"):
        assert f"\nosd_{name}" in ours
    assert httpx.get(f"{service.control_url}/dashboard").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "collective_rpc",
        "update_weights",
        "init_weight_transfer_engine",
        "pause",
        "resume",
        "sleep",
        "reset_prefix_cache",
        "server_info",
    ],
)
def test_development_routes_are_closed(service: Service, path: str) -> None:
    assert httpx.post(f"{service.url}/{path}", json={}).status_code == 404
    assert httpx.get(f"{service.url}/{path}").status_code == 404
