"""The connection to a Redis or Valkey server: commands, scripts, and errors that name the server
but no user or password."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError
from redis.retry import Retry

from osd.errors import ReplayBufferError
from osd.exchange.redis_url import HOW_TO_WRITE_ONE, check_client, is_clear, mask_text, mask_url

MIN_VERSION = (7, 0)
CONNECT_SECONDS = 2.0

Call = tuple[str, Sequence[str], Sequence[Any]]
"""A script call: Lua source, keys, arguments."""


class Link:
    """A pool of connections to one server.

    `timeout` bounds each wait for an answer, in seconds. Nothing is retried here; that is up to the
    callers.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.name = mask_url(url)
        self._url = url
        kept = {} if url.startswith("unix:") else {"socket_keepalive": True}
        try:
            if not is_clear(url):
                raise ValueError
            self._client: Any = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout,
                socket_connect_timeout=min(timeout, CONNECT_SECONDS),
                retry=Retry(NoBackoff(), 0),
                **kept,
            )
            check_client(self._client)
        except (ValueError, TypeError, RedisError):
            raise ReplayBufferError(f"{self.name}: {HOW_TO_WRITE_ONE}") from None

    def command(self, *args: Any) -> Any:
        """Run one command. Raises `RedisError`."""
        return self._client.execute_command(*args)

    def commands(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one round trip. Raises the first error."""
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
        """Run scripts in one round trip by their hash; send those that the server does not know in
        full.

        Returns the answers in order; the error of a single script counts as its answer. Raises
        `RedisError` when the server is away.
        """
        results = self._evaluate("EVALSHA", calls)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            again = self._evaluate("EVAL", [calls[i] for i in unknown])
            for i, result in zip(unknown, again, strict=True):
                results[i] = result
        return results

    def check_version(self) -> None:
        """Raise `ReplayBufferError` when the server is away or older than 7.0."""
        with self.errors():
            info = self.command("INFO", "server")
        version = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise ReplayBufferError(
                f"{self.name}: server version {version} is too old; use Redis 7.0 or later, or "
                "Valkey"
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn a `RedisError` into one line that names the server and the remedy."""
        try:
            yield
        except RedisError as error:
            raise ReplayBufferError(
                f"replay buffer {self.name}: {self.explain(error)}; start that server, or name "
                "another with --redis-url"
            ) from None

    def explain(self, error: RedisError) -> str:
        """What went wrong, on one line, without user and password."""
        return mask_text(error, self._url) or type(error).__name__

    def drop_connections(self) -> None:
        """Drop pooled connections: after a failure they are dead or carry late answers."""
        self._client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        self._client.close()

    def _evaluate(self, how: str, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for lua, keys, args in calls:
            script = lua if how == "EVAL" else _sha1(lua)
            pipeline.execute_command(how, script, len(keys), *keys, *args)
        return list(pipeline.execute(raise_on_error=False))


def is_out_of_memory(result: Any) -> bool:
    """Whether a script was refused because the server has reached `maxmemory`."""
    return isinstance(result, OutOfMemoryError) or (
        isinstance(result, RedisError) and "OOM" in str(result)
    )


def _sha1(lua: str) -> str:
    return hashlib.sha1(lua.encode(), usedforsecurity=False).hexdigest()
