"""What a request says of capture reaches the engine or is refused.

A request says it in headers or in its body; saying nothing changes nothing.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.headers import REFUSAL, ROUTES_THAT_CAN_BE_TOLD, HeadersToXargs

OFF = {"X-OSD-Capture": "off"}
NO = ["off", "OFF", "No", "0", "false", "disabled", "of", ""]
"""What is no plain yes keeps a request out."""
YES = ["on", "ON", " on ", "1", "true", "Yes"]


class App:
    """An application that notes what reaches it."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.after: list[Any] = []
        """the message after each body"""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        if scope["type"] == "http":
            self.after.append(await receive())

    @property
    def body(self) -> bytes:
        (body,) = self.bodies
        return body

    @property
    def xargs(self) -> Any:
        return json.loads(self.body)["vllm_xargs"]


def scope_of(
    headers: dict[str, str] | list[tuple[str, str]],
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    length: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    pairs = list(headers.items() if isinstance(headers, dict) else headers)
    pairs += [("Content-Length", str(length)), ("Content-Type", "application/json")]
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs]
    kind = str(b"http", "ascii")  # as a server reads it
    return {"type": kind, "method": method, "path": path, "headers": raw, **fields}


async def call(app: App, scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What is sent in answer by the application behind the middleware, given these messages of the
    client."""
    sent: list[dict[str, Any]] = []
    coming = iter([*messages, {"type": f"{scope['type']}.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(coming)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await HeadersToXargs(app)(scope, receive, send)
    return sent


async def post(
    content: bytes | dict[str, Any],
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    *,
    chunk: int = 1 << 20,
    **scope: Any,
) -> tuple[App, int, str]:
    """The application after a request; status and text of the refusal, or 0 and "" where it was let
    through."""
    app, body = App(), content if isinstance(content, bytes) else json.dumps(content).encode()
    pieces = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    messages = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]
    sent = await call(app, scope_of(headers or {}, length=len(body), **scope), *messages)
    if not sent:
        assert app.after == [{"type": "http.disconnect"}], (
            "the server still hears when the client goes away"
        )
        lengths = [value for name, value in app.scopes[0]["headers"] if name == b"content-length"]
        assert lengths == [str(len(app.body)).encode()]
        return app, 0, ""
    start, end = sent
    assert not app.bodies
    headers = dict(start["headers"])
    assert headers == {
        b"content-type": b"application/json",
        b"content-length": str(len(end["body"])).encode(),
    }
    error = json.loads(end["body"])["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", start["status"])
    return app, start["status"], error["message"]


async def assert_refused(
    content: bytes | dict[str, Any], headers: Any = None, **scope: Any
) -> None:
    _, status, message = await post(content, headers, **scope)
    assert (status, message) == (400, REFUSAL)


# ----------------------------------------------------------------------------------- saying nothing


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/inference/v1/generate", "/v1/audio/transcriptions"]
)
@pytest.mark.parametrize(
    "body",
    [
        b'{ "prompt" :"x",  "n":1 }',
        b'{"prompt": "what is osd_capture?", "use_beam_search" : true}',
        b'{"prompt": "caf\\u00e9",  "vllm_xargs": {"osd_spec_k": 2}}',
        b'{"vllm_xargs":  {"osd_capture": "on"}}',
        b'{"vllm_xargs":  {"osd_capture": true, "osd_domain": "a", "best": 5}, "capture": "off"}',
        b'{ "xargs": ["osd_capture"], "vllm_xargs": null}',
        b'{"sampling_params":  {"extra_args": {"osd_capture": "off"}}}',
        '{"prompt":  "x"}'.encode("utf-16"),
        b"",
        b"not json",
        b"\\u00 \xff\xfe",
        b"--boundary\r\n\x00\x01\x02",
        b'["\\u0041"]',
        b'{"a":' * 3000 + b'"\\u0041"' + b"}" * 3000,
    ],
)
async def test_a_request_that_says_nothing_passes_byte_for_byte(
    body: bytes, path: str, chunk: int
) -> None:
    app, status, _ = await post(
        body, {"X-OSD-Capture": "on"} if chunk == 5 else {}, path=path, chunk=chunk
    )
    assert status == 0
    assert app.body == body


async def test_what_passes_untouched_is_not_even_copied() -> None:
    app, scope = App(), scope_of({})
    await call(app, scope, {"type": "http.request", "body": b"{}"})
    assert app.scopes[0] is scope


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_methods_without_a_body_are_none_of_our_business(method: str) -> None:
    app, scope = App(), scope_of(OFF, method=method)
    assert await call(app, scope, {"type": "http.request"}) == []
    assert app.scopes[0] is scope


async def test_what_is_no_request_passes() -> None:
    app, scope = App(), {"type": "lifespan"}
    assert await call(app, scope) == []
    assert app.scopes[0] is scope


async def test_a_client_that_goes_away_while_it_sends_is_not_served() -> None:
    app = App()
    sent = await call(app, scope_of(OFF), {"type": "http.request", "body": b"{", "more_body": True})
    assert (sent, app.scopes) == ([], [])


# ------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("chunk", [5, 1 << 20])
async def test_headers_become_xargs(chunk: int) -> None:
    app, _, _ = await post({"prompt": "é"}, OFF | {"X-OSD-Domain": " sql "}, chunk=chunk)
    assert json.loads(app.body) == {
        "prompt": "é",
        "vllm_xargs": {"osd_capture": "off", "osd_domain": "sql"},
    }
    assert (b"content-type", b"application/json") in app.scopes[0]["headers"], "other headers stay"


@pytest.mark.parametrize("xargs", [None, "text", [], {}])
async def test_a_domain_needs_no_xargs_to_be_there(xargs: object) -> None:
    app, _, _ = await post({"vllm_xargs": xargs}, {"X-OSD-Domain": "sql"})
    assert app.xargs == {"osd_domain": "sql"}


async def test_a_domain_that_cannot_be_told_changes_nothing() -> None:
    """Without the wish, what is wrong with the body is vLLM's to say."""
    for body, path in (
        (b"not json", "/v1/completions"),
        (b"{ }", "/generative_scoring"),
        (b"[ ]", "/v1/messages"),
    ):
        app, _, _ = await post(body, {"X-OSD-Domain": "x"}, path=path)
        assert app.body == body
    app, _, _ = await post({"use_beam_search": True}, {"X-OSD-Domain": "x"})
    assert app.xargs == {"osd_domain": "x"}


async def test_the_body_names_the_domain_and_off_always_wins() -> None:
    xargs = {"osd_capture": "on", "osd_domain": "body", "other": 1}
    app, _, _ = await post(
        {"vllm_xargs": xargs}, {"X-OSD-Capture": "OFF", "X-OSD-Domain": "header"}
    )
    assert app.xargs == {"osd_capture": "off", "osd_domain": "body", "other": 1}
    app, _, _ = await post(
        {"vllm_xargs": {"osd_capture": "no"}}, {"X-OSD-Capture": "on", "X-OSD-Domain": "header"}
    )
    assert app.xargs == {"osd_capture": "off", "osd_domain": "header"}


@pytest.mark.parametrize("first", ["off", "on"])
async def test_of_contradicting_headers_off_wins(first: str) -> None:
    second = {"off": "on", "on": "off"}[first]
    app, _, _ = await post({}, [("X-OSD-Capture", first), ("X-OSD-Capture", second)])
    assert app.xargs == {"osd_capture": "off"}
    app, _, _ = await post({}, {"X-OSD-Capture": f"{first}, {second}"})  # as a proxy joins them
    assert app.xargs == {"osd_capture": "off"}


# ------------------------------------------------------------------------------ every way to say no


def in_header(wish: str) -> tuple[dict[str, Any], dict[str, str]]:
    return {}, {"X-OSD-Capture": wish}


def in_body(wish: str) -> tuple[dict[str, Any], dict[str, str]]:
    return {"vllm_xargs": {"osd_capture": wish}}, {}


def in_both(wish: str) -> tuple[dict[str, Any], dict[str, str]]:
    return {"vllm_xargs": {"osd_capture": "on"}}, {"X-OSD-Capture": wish}


@pytest.mark.parametrize("way", [in_header, in_body, in_both])
@pytest.mark.parametrize("wish", NO)
async def test_each_no_is_told_or_refused(way: Any, wish: str) -> None:
    body, headers = way(wish)
    for path in ROUTES_THAT_CAN_BE_TOLD:
        app, _, _ = await post({"prompt": "x", **body}, headers, path=path)
        assert app.xargs == {"osd_capture": "off"}
    await assert_refused(body, headers, path="/v1/chat/completions/batch")
    await assert_refused(body, headers, path="/generative_scoring", method="PUT")
    for yes in (True, 1, "true"):
        await assert_refused({"use_beam_search": yes, **body}, headers)
    for no in (False, 0, None):
        app, _, _ = await post({"use_beam_search": no, **body}, headers)
        assert app.xargs == {"osd_capture": "off"}


@pytest.mark.parametrize("way", [in_header, in_body, in_both])
@pytest.mark.parametrize("wish", YES)
async def test_a_yes_is_none_of_these(way: Any, wish: str) -> None:
    body, headers = way(wish)
    for path in ("/v1/completions", "/generative_scoring"):
        app, _, _ = await post({"use_beam_search": True, **body}, headers, path=path)
        assert json.loads(app.body) == {"use_beam_search": True, **body}


@pytest.mark.parametrize("wish", [False, 0, None, ["on"], {}, 1.5])
async def test_values_that_are_no_text_keep_out_as_well(wish: object) -> None:
    app, _, _ = await post({"vllm_xargs": {"osd_capture": wish}})
    assert app.xargs == {"osd_capture": "off"}


@pytest.mark.parametrize("xargs", ['{"osd_capture": "off"}', [{"osd_capture": "off"}]])
async def test_xargs_that_vllm_could_not_read_keep_out(xargs: object) -> None:
    await assert_refused({"vllm_xargs": xargs}, path="/v1/chat/completions/batch")


TEXT = '{"prompt": "é", "vllm_xargs": {"osd_capture": "off"}}'


@pytest.mark.parametrize(
    "body",
    [
        TEXT.encode(),
        TEXT.replace("osd_capture", "osd\\u005fcapture").encode(),
        TEXT.replace("osd_capture", "\\u006F\\u0073\\u0064\\u005F\\u0063apture").encode(),
        *(
            TEXT.encode(name)
            for name in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")
        ),
        '\n {"vllm_xargs": {"osd_capture": "off"}}'.encode("utf-16-be"),
    ],
)
async def test_a_no_is_read_in_whatever_way_it_is_written(body: bytes) -> None:
    app, _, _ = await post(body)
    assert app.xargs == {"osd_capture": "off"}
    await assert_refused(body, path="/inference/v1/generate")


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"osd_capture": "off", "osd_capture": "on"}}',
        b'{"vllm_xargs": {"osd_capture": "on", "osd_capture": "off"}}',
        b'{ "vllm_xargs": {"osd_capture": "off"}, "vllm_xargs": {"osd_capture": "on"}}',
        b'{"vllm_xargs": {"osd_capture": "off"}, "n": 2, "vllm_xargs": {}}',
        b'{"vllm_xargs": {}, "vllm_xargs": {"osd_capture": "off"}}',
    ],
)
async def test_a_no_that_is_said_beside_a_yes_counts(body: bytes) -> None:
    app, _, _ = await post(body)
    assert app.xargs == {"osd_capture": "off"}


async def test_of_other_members_with_one_name_the_last_counts_as_for_vllm() -> None:
    app, _, _ = await post(b'{"n": 1, "vllm_xargs": {"a": 1, "a": 2}, "n": 2}', OFF)
    assert json.loads(app.body) == {"n": 2, "vllm_xargs": {"a": 2, "osd_capture": "off"}}


@pytest.mark.parametrize("headers", [OFF, {}])
@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"osd_capture": "off"}',
        b'[{"osd_capture": "off"}]',
        b'--x\r\n{"osd_capture": "off"}',
    ],
)
async def test_what_cannot_be_told_not_to_be_captured_is_refused(
    body: bytes, headers: dict[str, str]
) -> None:
    await assert_refused(body, headers)


@pytest.mark.parametrize("body", [b"not json", b"[]", b"", b"[" * 100_000])
async def test_a_header_cannot_be_told_in_what_is_no_json_object(body: bytes) -> None:
    await assert_refused(body, OFF)


async def test_a_request_that_is_kept_out_leaves_nothing_to_go_on_from() -> None:
    """The Responses API can keep answers in memory; a later request on top of one would be captured
    with it."""
    for headers, body in ((OFF, {}), ({}, {"vllm_xargs": {"osd_capture": "off"}})):
        app, _, _ = await post({"input": "x", "store": True, **body}, headers, path="/v1/responses")
        assert json.loads(app.body)["store"] is False
        app, _, _ = await post({"store": True, **body}, headers, path="/v1/chat/completions")
        assert json.loads(app.body)["store"] is True
    app, _, _ = await post({"store": True}, {"X-OSD-Domain": "sql"}, path="/v1/responses")
    assert json.loads(app.body)["store"] is True, "one that is captured may be kept"


# -------------------------------------------------------------------------- a limit of draft tokens


@pytest.mark.parametrize("value", [2, 2.0, "2", 0])
async def test_a_limit_that_is_a_whole_number_passes(value: object) -> None:
    body = json.dumps({"vllm_xargs": {"osd_spec_k": value}}).encode()
    assert (await post(body))[0].body == body
    app, _, _ = await post(body, OFF)
    assert app.xargs == {"osd_spec_k": value, "osd_capture": "off"}


@pytest.mark.parametrize(
    "value",
    ["2.9", "true", "-1", "NaN", "1e400", "null", '"two"', "[2]", "9" * 12, '"' + "9" * 5000 + '"'],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generative_scoring"])
async def test_a_limit_that_is_none_is_refused_with_what_it_said(value: str, path: str) -> None:
    for body in (
        f'{{"vllm_xargs": {{"osd_spec_k": {value}}}}}',
        f'{{"vllm_xargs": {{"\\u006fsd_spec_k": {value}}}}}',
    ):
        _, status, message = await post(body.encode(), path=path)
        said = {"1e400": "Infinity"}.get(value, value)[:40]
        assert status == 400
        assert message == (
            "vllm_xargs.osd_spec_k is a whole number of draft tokens, such as 2, and 0 for none; "
            f"not {said}"
        )


@pytest.mark.parametrize(
    "body, names",
    [
        ({"osd_capture": "off"}, ("osd_capture", '"vllm_xargs": {...}')),
        ({"osd_domain": "sql"}, ("osd_domain", '"vllm_xargs": {...}')),
        (
            {"vllm_xargs": {"osd_captur": "off"}},
            ("vllm_xargs.osd_captur:", "osd_capture, osd_domain, osd_spec_k"),
        ),
        ({"vllm_xargs": {"osd_calibration": 1}}, ("vllm_xargs.osd_calibration:", "osd_capture")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
async def test_a_word_of_ours_misspelt_or_at_another_place_is_refused(
    body: dict[str, Any], names: tuple[str, ...], path: str
) -> None:
    _, status, message = await post(body, path=path)
    assert status == 400 and all(name in message for name in names) and "\n" not in message


def test_the_refusal_is_one_line_that_names_the_header_and_the_remedy() -> None:
    assert "\n" not in REFUSAL
    for part in (
        "X-OSD-Capture",
        "vllm_xargs.osd_capture",
        "JSON",
        "beam search",
        *ROUTES_THAT_CAN_BE_TOLD,
    ):
        assert part in REFUSAL


# -------------------------------------------------------------------------------------- web sockets


def socket_of(headers: dict[str, str], *extensions: str) -> dict[str, Any]:
    scope = scope_of(headers, path="/v1/realtime", extensions={name: {} for name in extensions})
    del scope["method"]
    return scope | {"type": "websocket"}


async def test_a_socket_over_which_the_engine_cannot_be_told_is_not_opened() -> None:
    connect, app = {"type": "websocket.connect"}, App()
    start, body = await call(app, socket_of(OFF, "websocket.http.response"), connect)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert body["type"] == "websocket.http.response.body"
    assert json.loads(body["body"])["error"]["message"] == REFUSAL
    (close,) = await call(app, socket_of(OFF), connect)
    assert (close["type"], close["code"]) == ("websocket.close", 1008)
    assert len(close["reason"].encode()) <= 123, "or it cannot be sent"
    assert app.scopes == []


async def test_other_sockets_are_opened() -> None:
    app = App()
    for headers in ({}, {"X-OSD-Capture": "on"}, {"X-OSD-Domain": "x"}):
        assert await call(app, scope := socket_of(headers)) == []
        assert app.scopes[-1] is scope
