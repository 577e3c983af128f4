"""vLLM's server, as built from its parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serving.vllm import server

ARGUMENTS = SimpleNamespace(
    uvicorn_log_level="info",
    ssl_keyfile=None,
    ssl_certfile=None,
    ssl_ca_certs=None,
    ssl_cert_reqs=0,
    ssl_ciphers=None,
    h11_max_incomplete_event_size=4096,
    h11_max_header_count=64,
)


NAME = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"


@pytest.mark.parametrize(("environ", "seconds"), [({}, 75), ({NAME: "5"}, 5)])
def test_connections_outlive_a_pause_of_the_machine(
    environ: dict[str, str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than clients keep theirs, unless the operator says otherwise."""
    server.prepare_environment(environ)
    monkeypatch.setenv(NAME, environ[NAME])
    built = server.http_server(lambda: None, ARGUMENTS, seconds_to_finish=3)
    assert built.config.timeout_keep_alive == seconds
    assert built.config.timeout_graceful_shutdown == 3
