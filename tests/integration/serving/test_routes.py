"""Requests that ask to be kept out of capture, with a planted text, on every route of vLLM.

The application is vLLM's. Its handlers are stand-ins that note what would have reached the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving.headers import REFUSAL, ROUTES_THAT_CAN_BE_TOLD, HeadersToXargs
from serving.vllm import server
from tests.support.older_vllm import IS_0_31, has_come_with
from tests.support.planted import LEADS_TO_THE_ENGINE, SECRET, SINCE, TOKENS, ways

TAKES_FORMS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
STAYS_IN_THE_SERVER = {
    "/tokenize",
    "/detokenize",
    "/ping",
    "/v1/responses/{response_id}/cancel",
    "/v1/messages/count_tokens",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/v1/chat/completions/render",
    "/v1/messages/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/abort_requests",
}
LEADS_THERE_NOW = [path for path in LEADS_TO_THE_ENGINE if has_come_with(SINCE.get(path, "0"))]
REACHED = 418


class Handlers:
    """Every handler of the application: notes the requests it is given and answers with an
    error."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        async def handle(*args: Any, **kwargs: Any) -> Any:
            from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

            self.requests += [
                one for one in (*args, *kwargs.values()) if hasattr(one, "model_dump")
            ]
            return ErrorResponse(error=ErrorInfo(message="", type="", code=REACHED))

        return handle


class State:
    """Of the application: handlers, whatever they are called."""

    enable_server_load_tracking = False

    def __init__(self, args: Any) -> None:
        self.args = args
        self.handlers = Handlers()

    def __getattr__(self, name: str) -> Any:
        return self.handlers


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """With whatever vLLM can offer for a model that generates, or that listens."""
    level = logging.root.level
    server.prepare_environment()
    from vllm.entrypoints.launchers.app import build_app

    args = server.engine_arguments("no-model", {"enable_scale_out": True})
    app = build_app(args, ("generate", "transcription", "realtime"), None)
    logging.root.setLevel(level)  # an import of vLLM's silences the whole process
    app.state = State(args)
    yield app


async def post(
    app: Any, path: str, headers: dict[str, str], **content: Any
) -> tuple[httpx.Response, list[Any]]:
    """The answer, and the requests that reached a handler."""
    requests = app.state.handlers.requests
    requests.clear()
    transport = httpx.ASGITransport(app=HeadersToXargs(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path.replace("{response_id}", "r"), headers=headers, **content)
    return answer, list(requests)


def extra_args(request: Any) -> dict[str, Any]:
    """What the engine is told with a request that has reached its handler."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    if isinstance(request, AnthropicMessagesRequest):
        request = AnthropicServingMessages.to_chat_completion_request(request)
    if getattr(request, "use_beam_search", False):
        return {}  # for each beam vLLM makes a request of its own
    return request.to_sampling_params(4, {}).extra_args or {}


def test_no_route_is_unknown(app: Any) -> None:
    """A route that an upgrade of vLLM brings must be looked at: does it lead to the engine, and can
    it be told?"""
    methods = {route.path: getattr(route, "methods", None) for route in app.routes}
    assert {path for path, found in methods.items() if found is None} == {
        "/v1/realtime",
        "/metrics",
    }
    posts = {path for path, found in methods.items() if found and not found <= {"GET", "HEAD"}}
    known = {*LEADS_THERE_NOW, *TAKES_FORMS, *STAYS_IN_THE_SERVER}
    assert posts - known == set()
    assert posts == known or IS_0_31, "one that is gone is not to be looked for"
    assert {*ROUTES_THAT_CAN_BE_TOLD} <= LEADS_TO_THE_ENGINE.keys()


@pytest.mark.parametrize("path", LEADS_THERE_NOW)
async def test_a_request_that_says_nothing_reaches_its_handler(app: Any, path: str) -> None:
    """So that the walk below is one: each of these would be served, and stored."""
    answer, requests = await post(app, path, {}, json=LEADS_TO_THE_ENGINE[path])
    assert answer.status_code == REACHED
    assert any(
        SECRET in text or str(TOKENS) in text for text in (str(request) for request in requests)
    )


@pytest.mark.parametrize("way", ways())
async def test_who_asks_to_be_kept_out_is_told_to_the_engine_or_refused(app: Any, way: str) -> None:
    headers, said = ways()[way]
    for path in (*LEADS_TO_THE_ENGINE, *STAYS_IN_THE_SERVER):
        answer, requests = await post(
            app, path, headers, json=LEADS_TO_THE_ENGINE.get(path, {}) | said
        )
        if path in ROUTES_THAT_CAN_BE_TOLD and "beams" not in way:
            assert answer.status_code == REACHED, path
            assert [extra_args(request)["osd_capture"] for request in requests] == ["off"], path
        else:
            assert (answer.status_code, requests) == (400, []), path
            assert answer.json()["error"]["message"] == REFUSAL


@pytest.mark.parametrize("path", sorted(TAKES_FORMS))
async def test_forms_cannot_be_told(app: Any, path: str) -> None:
    content = {"files": {"file": SECRET.encode()}, "data": {"model": "m"}}
    answer, requests = await post(app, path, {}, **content)
    assert (answer.status_code, len(requests)) == (REACHED, 1)
    told = content | {"data": {"vllm_xargs": '{"osd_capture": "off"}'}}
    for headers, sent in (({"X-OSD-Capture": "off"}, content), ({}, told)):
        answer, requests = await post(app, path, headers, **sent)
        assert (answer.status_code, answer.json()["error"]["message"], requests) == (
            400,
            REFUSAL,
            [],
        )


async def test_a_response_that_is_kept_out_cannot_be_gone_on_from(app: Any) -> None:
    body = LEADS_TO_THE_ENGINE["/v1/responses"]
    _, (request,) = await post(app, "/v1/responses", {}, json=body)
    assert request.store
    _, (request,) = await post(app, "/v1/responses", {"X-OSD-Capture": "off"}, json=body)
    assert not request.store
    in_background = body | {"background": True}
    answer, requests = await post(
        app, "/v1/responses", {"X-OSD-Capture": "off"}, json=in_background
    )
    assert (answer.status_code, requests) == (400, []), "vLLM keeps what runs in the background"
