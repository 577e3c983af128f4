"""Redis URLs: masks their credentials, also in the messages of servers and clients; says which mean
this machine alone."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

HOW_TO_WRITE_ONE = (
    "not a Redis URL; give one like redis://user:password@host:6379/0 with --redis-url (in user "
    "and password, %2F stands for /, %3F for ?, %23 for #; behind a ?, options of redis-py alone)"
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_CREDENTIALS = ("username", "password")
"""Options behind the `?` that hold credentials."""


def mask_url(url: str) -> str:
    """The URL without user, password and options, for logs and errors. Where they cannot be told
    apart from the rest, all of it becomes `***`.

    Example:
        mask_url("redis://me:secret@127.0.0.1:7000/0") == "redis://127.0.0.1:7000/0"
    """
    parts = _split(url)
    if parts is None:
        scheme = url.partition("://")[0]
        return f"{scheme if '://' in url and _SCHEME.fullmatch(scheme) else 'redis'}://***"
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.hostname is None:
        return f"{parts.scheme}://***"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def is_clear(url: str) -> bool:
    """Whether it is certain where user and password end. Otherwise a part of them would be taken
    for the host, and shown in every error."""
    return _split(url) is not None


def check_client(client: Any) -> None:
    """Raise what a client of `redis` would raise when it connects for options that there are not,
    and for a host that is no name."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    str(pool.connection_kwargs.get("host", "")).encode("idna")


def mask_text(text: object, url: str) -> str:
    """A server's or client's message, on one line, without this URL's user and password."""
    line = " ".join(str(text).split())
    for secret in sorted(_secrets(url), key=len, reverse=True):
        line = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", line)
    return line


def _split(url: str) -> SplitResult | None:
    """The parts of a clear URL; None for all others.

    A URL is not clear when an @ may stand anywhere but right before the host. What looks like host,
    port or path may then be a part of the password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    if (
        "://" not in url
        or not _SCHEME.fullmatch(parts.scheme)
        or parts.fragment
        or not _is_clear_query(parts.query)
    ):
        return None
    if parts.scheme == "unix":
        return parts if not parts.netloc or parts.netloc.endswith("@") else None
    return parts if re.fullmatch(r"/?\d*", parts.path) else None


def _is_clear_query(query: str) -> bool:
    """Whether it holds nothing but options. An @ may stand only in the value of a credential."""
    options = [option.partition("=") for option in query.split("&")] if query else []
    return all(
        re.fullmatch(r"\w+", name) and ("@" not in value or name in _CREDENTIALS)
        for name, _, value in options
    )


def _secrets(url: str) -> set[str]:
    parts = _split(url)
    if parts is None:
        return set()
    options = parse_qs(parts.query)
    named = [value for name in _CREDENTIALS for value in options.get(name, [])]
    return {unquote(value) for value in (parts.username, parts.password, *named) if value}


def names_its_own_machine(url: str) -> bool:
    """Whether the server's address means another machine on each machine: a loopback address or a
    socket file."""
    parts = _split(url)
    if parts is None:
        return False
    return parts.scheme == "unix" or is_loopback(parts.hostname or "")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
