"""A Redis URL is shown without any part of its user or password, however it is written."""

from __future__ import annotations

import pytest

from buffers.link import Link
from osd.errors import ConfigError, ReplayBufferError
from osd.exchange.redis_url import is_clear, mask_text, mask_url
from osd.exchange.registry import Registry


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://h", "redis://h"),
        ("redis://:pw@h:1/0", "redis://h:1/0"),
        ("redis://me@h/0", "redis://h/0"),
        ("redis://:p@ss@h/0", "redis://h/0"),
        ("redis://m@e:p:w@h/", "redis://h/"),
        ("rediss://me:p%40w@h.example/2?ssl_ca_certs=/ca.pem", "rediss://h.example/2"),
        ("redis://h:1/0?db=1&password=pw@x&username=m@e", "redis://h:1/0"),
        ("redis://me:pw@[::1]:1/0", "redis://[::1]:1/0"),
        ("unix:///run/valkey.sock?db=0&password=pw", "unix:///run/valkey.sock"),
        ("unix://me:pw@/run/a@b.sock", "unix:///run/a@b.sock"),
        ("http://:pw@h", "http://h"),
        ("redis://", "redis://***"),
        ("redis://:pw@", "redis://***"),
    ],
)
def test_a_url_shows_where_it_leads_and_not_who_goes_there(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert is_clear(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p/w@h:1/0", "redis://***"),
        ("redis://:p?w@h:1/0", "redis://***"),
        ("redis://:p#w@h:1/0", "redis://***"),
        ("redis://:p[w@h:1/0", "redis://***"),
        ("redis://me:12/w@h:1/0", "redis://***"),
        ("redis://me:12?w@h:1/0", "redis://***"),
        ("redis://me:12?w=x@h:1/0", "redis://***"),
        ("redis://me:12#w@h:1/0", "redis://***"),
        ("redis://h:port/0", "redis://***"),
        ("redis://h/a/b", "redis://***"),
        ("unix://:p/w@/run/valkey.sock", "unix://***"),
        ("unix://[/run/valkey.sock", "unix://***"),
        ("me:pw@h:1", "redis://***"),
        ("me:p://w@h:1", "redis://***"),
        ("pw", "redis://***"),
        ("", "redis://***"),
    ],
)
def test_what_cannot_be_told_apart_is_not_shown_and_not_used(url: str, shown: str) -> None:
    assert mask_url(url) == shown
    assert not is_clear(url)
    with pytest.raises(ReplayBufferError, match="not a Redis URL; .* %2F stands for /") as caught:
        Link(url, timeout=1)
    with pytest.raises(ConfigError, match="not a Redis URL; .* %2F stands for /") as refused:
        Registry(url, "a")
    assert str(caught.value).startswith(f"{shown}: ") and str(refused.value).startswith(
        f"buffer.redis_url={shown}: "
    )


@pytest.mark.parametrize(
    "url",
    [
        "rediss://me:pw@h:6379/0?ssl_ca_cert=/ca.pem",
        "rediss://me:pw@h/0?ssl_cert_reqs=perhaps",
        "redis://me:pw@h/0?protocol=9",
        "unix:///run/s?socket_keepalive=yes",
        "redis://me:pw@valkey..example:6379",
        f"redis://me:pw@{'a' * 64}.example",
    ],
)
def test_what_no_client_could_connect_by_is_refused_before_it_tries(url: str) -> None:
    with pytest.raises(
        ReplayBufferError, match="not a Redis URL; .* options of redis-py"
    ) as caught:
        Link(url, timeout=1)
    with pytest.raises(ConfigError, match="not a Redis URL; .* options of redis-py") as refused:
        Registry(url, "a")
    assert "pw" not in f"{caught.value} {refused.value}".replace("password", "")


def test_a_scheme_that_is_not_redis_is_refused() -> None:
    with pytest.raises(ReplayBufferError, match="^http://h/0: not a Redis URL"):
        Link("http://me:pw@h/0", timeout=1)


@pytest.mark.parametrize(
    "url",
    [
        "redis://alice:s%40cret@h",
        "redis://h?username=alice&password=s%40cret",
        "unix://alice:s@cret@/run/s",
    ],
)
def test_what_a_server_says_shows_neither_user_nor_password(url: str) -> None:
    said = "NOPERM User alice\n has no permissions; alices 's@cret' malice"
    assert mask_text(said, url) == "NOPERM User *** has no permissions; alices '***' malice"


def test_the_longer_secret_is_masked_first() -> None:
    assert mask_text("the password is a-b", "redis://a:a-b@h") == "the password is ***"


def test_a_url_without_user_and_password_hides_nothing() -> None:
    for url in ("redis://h:1/0?db=1", "redis://:p/w@h"):
        assert mask_text("Error 111 connecting to h:1.", url) == "Error 111 connecting to h:1."
