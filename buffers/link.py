"""The connection to a Redis or Valkey server: scripts, backing off, and errors that name the server but nobody."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError
from redis.retry import Retry

from osd.errors import ReplayBufferError
from osd.exchange.redis_url import HOW_TO_WRITE_ONE, is_clear, mask_text, mask_url

MIN_VERSION = (7, 0)
CONNECT_SECONDS = 2.0

Call = tuple[str, Sequence[str], Sequence[Any]]
"""A script call: Lua source, keys, arguments."""


class Link:
    """One server, one pool of connections, one patience.

    `timeout` bounds each wait for an answer in seconds. Nothing is tried twice here: callers know better.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.name = mask_url(url)
        self._url = url
        try:
            if not is_clear(url):
                raise ValueError
            self._client: Any = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout,
                socket_connect_timeout=min(timeout, CONNECT_SECONDS),
                socket_keepalive=not url.startswith("unix:"),
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, TypeError):
            raise ReplayBufferError(f"{self.name}: {HOW_TO_WRITE_ONE}") from None

    def command(self, *args: Any) -> Any:
        """Run one command. Raises `RedisError`."""
        return self._client.execute_command(*args)

    def commands(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one round trip; the first error is raised."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute())

    def script(self, lua: str, keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
        """Run one script. Raises `RedisError`."""
        (result,) = self.scripts([(lua, keys, args)])
        if isinstance(result, Exception):
            raise result
        return result

    def scripts(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip, by their hash; those the server does not know are sent in full.

        The answers in order; a script's own error is an answer too. Raises `RedisError` when the server is away.
        """
        results = self._evaluate("EVALSHA", calls)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            again = self._evaluate("EVAL", [calls[i] for i in unknown])
            for i, result in zip(unknown, again, strict=True):
                results[i] = result
        return results

    def check_version(self) -> None:
        """Raises `ReplayBufferError` when the server is away or older than 7.0."""
        with self.errors():
            info = self.command("INFO", "server")
        version = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise ReplayBufferError(
                f"{self.name}: server version {version} is too old; use Redis 7.0 or later, or Valkey"
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn a `RedisError` into one line that names the server and the remedy."""
        try:
            yield
        except RedisError as error:
            raise ReplayBufferError(
                f"replay buffer {self.name}: {self.explain(error)}; start that server, or name another with --redis-url"
            ) from None

    def explain(self, error: RedisError) -> str:
        """What went wrong, on one line, without user and password."""
        return mask_text(error, self._url) or type(error).__name__

    def drop_connections(self) -> None:
        """Forget pooled connections, which are dead or carry late answers after a failure."""
        self._client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self._client.close()

    def _evaluate(self, how: str, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for lua, keys, args in calls:
            script = lua if how == "EVAL" else _sha1(lua)
            pipeline.execute_command(how, script, len(keys), *keys, *args)
        return list(pipeline.execute(raise_on_error=False))


class Backoff:
    """Whether a server that failed may be tried again: after 0.1 s, then twice as long each time, up to 5 s."""

    def __init__(self, first: float = 0.1, longest: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._delay = 0.0
        self._next_try = 0.0
        self._lock = threading.Lock()

    def may_try(self) -> bool:
        """Whether to try now. While the server is failing, one caller at a time is told to."""
        with self._lock:
            if self._delay and self._clock() < self._next_try:
                return False
            self._next_try = self._clock() + self._delay
            return True

    def failed(self) -> bool:
        """Note a failure; return whether it is the first of an outage."""
        with self._lock:
            is_first = not self._delay
            self._delay = min(max(2 * self._delay, self._first), self._longest)
            self._next_try = self._clock() + self._delay
            return is_first

    def succeeded(self) -> bool:
        """Note a success; return whether it ends an outage."""
        with self._lock:
            was_failing = bool(self._delay)
            self._delay = 0.0
            return was_failing


def is_out_of_memory(result: Any) -> bool:
    """Whether a script was refused because the server has reached `maxmemory`."""
    return isinstance(result, OutOfMemoryError) or (isinstance(result, RedisError) and "OOM" in str(result))


def _sha1(lua: str) -> str:
    return hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()
