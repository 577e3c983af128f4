"""Our request headers become vLLM's arguments; a request without them is not touched."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from serving.headers import HeadersToXargs


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the body it got."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def post(content: bytes, headers: dict[str, str], chunks: bool = False) -> httpx.Response:
    async def parts() -> Any:
        for i in range(0, len(content), 5):
            yield content[i : i + 5]

    transport = httpx.ASGITransport(app=HeadersToXargs(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/completions", content=parts() if chunks else content, headers=headers)


async def test_a_request_without_our_headers_passes_byte_for_byte() -> None:
    body = b'{ "prompt" :"x",  "n":1 }'
    assert (await post(body, {})).content == body


@pytest.mark.parametrize("chunks", [False, True])
async def test_headers_become_xargs(chunks: bool) -> None:
    answer = await post(b'{"prompt": "x"}', {"X-OSD-Capture": "off", "X-OSD-Domain": "sql"}, chunks)
    assert answer.json() == {"prompt": "x", "vllm_xargs": {"osd_capture": "off", "osd_domain": "sql"}}


async def test_the_body_names_the_domain_and_off_always_wins() -> None:
    body = json.dumps({"vllm_xargs": {"osd_capture": "on", "osd_domain": "body", "other": 1}}).encode()
    answer = await post(body, {"X-OSD-Capture": "OFF", "X-OSD-Domain": "header"})
    assert answer.json()["vllm_xargs"] == {"osd_capture": "off", "osd_domain": "body", "other": 1}
    body = json.dumps({"vllm_xargs": {"osd_capture": "off"}}).encode()
    assert (await post(body, {"X-OSD-Capture": "on"})).json()["vllm_xargs"]["osd_capture"] == "off"


async def test_what_cannot_be_told_not_to_be_captured_is_refused() -> None:
    answer = await post(b"not json", {"X-OSD-Capture": "off"})
    assert answer.status_code == 400
    assert "X-OSD-Capture" in answer.json()["error"]["message"]
    # Without the wish, what is wrong with the body is vLLM's to say.
    assert (await post(b"not json", {"X-OSD-Domain": "x"})).content == b"not json"


async def test_of_contradicting_headers_off_wins() -> None:
    transport = httpx.ASGITransport(app=HeadersToXargs(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = [("X-OSD-Capture", "off"), ("X-OSD-Capture", "on"), ("Content-Type", "application/json")]
        answer = await client.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.json() == {"vllm_xargs": {"osd_capture": "off"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/inference/v1/generate", "/generative_scoring"])
async def test_routes_on_which_the_engine_cannot_be_told_refuse_an_opt_out(path: str) -> None:
    transport = httpx.ASGITransport(app=HeadersToXargs(echo))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(path, content=b"{}", headers={"X-OSD-Capture": "off"})).status_code == 400
        assert (await client.post(path, content=b"{}", headers={"X-OSD-Domain": "x"})).content == b"{}"


async def test_beam_search_cannot_opt_out_and_says_so() -> None:
    assert (await post(b'{"use_beam_search": true}', {"X-OSD-Capture": "off"})).status_code == 400
