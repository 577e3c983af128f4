"""What replicas and controller tell each other through Redis: heartbeats, the wanted draft, a feed.

Replicas pull: each writes its heartbeat, reads the wanted release, and appends records to the feed.
The controller reads them. All of it may be lost: replicas repeat their heartbeats, the controller
writes the wanted release again from disk, and the feed is only history.

Keys: `osd:DEPLOYMENT:replicas` (set of names), `osd:DEPLOYMENT:replica:NAME` (a heartbeat that
expires), `osd:DEPLOYMENT:wanted:DRAFT` (a `DraftRelease`), `osd:DEPLOYMENT:feed` (the stream),
`osd:DEPLOYMENT:canary:DRAFT` (a `Canary`), `osd:DEPLOYMENT:places` (part -> `Place`),
`osd:DEPLOYMENT:terms` (`EngineTerms`), `osd:DEPLOYMENT:members` (of `Member`),
`osd:DEPLOYMENT:purges` (a number), `osd:DEPLOYMENT:published:SENDER` (a number that expires).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from osd.errors import ConfigError, ReplayBufferError
from osd.exchange.redis_url import HOW_TO_WRITE_ONE, check_client, is_clear, mask_text, mask_url
from osd.records import (
    Canary,
    DraftRelease,
    EngineTerms,
    Event,
    Member,
    MetricPoint,
    Place,
    ReplicaStatus,
    RoundOutcome,
    SpecWindow,
    SwapReport,
    decode,
    encode,
)

FeedRecord = SpecWindow | SwapReport | Event | RoundOutcome | MetricPoint
"""A record of the feed."""

FEED_TYPES: dict[str, type[FeedRecord]] = {
    record_type.__name__: record_type
    for record_type in (SpecWindow, SwapReport, Event, RoundOutcome, MetricPoint)
}

OF_REPLICAS = (SpecWindow, SwapReport)
"""Records that replicas write, whose clocks may be wrong."""
FEED_LENGTH = 50_000
"""Records kept in the feed (about 25 MB); the oldest leave first."""
PUBLISHED_TTL = 86_400
"""Seconds for which it is known what a sender published last."""


class Registry:
    """The shared state of one deployment. Blocking, thread-safe, without threads of its own.

    Every method raises `ReplayBufferError` (one line, without credentials) when Redis is away or
    refuses.

    Example:
        registry = Registry("redis://127.0.0.1:6379/0", "default")
        registry.heartbeat(ReplicaStatus(replica="replica-0", ...), ttl_s=5)
        if (release := registry.wanted()) and release.version != serving:
            registry.publish(swap(release))
    """

    def __init__(
        self, url: str, deployment: str, *, timeout_s: float = 2.0, feed_length: int = FEED_LENGTH
    ) -> None:
        self._url, self._where = url, mask_url(url)
        self._prefix = f"osd:{deployment}"
        self._feed_length = feed_length
        try:
            if not is_clear(url):
                raise ValueError
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                # One retry at once: a pooled connection may be stale after a restart of the
                # server. No retry after a timeout, which could append to the feed twice.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
            check_client(self._redis)
        except (ValueError, TypeError, redis.RedisError):
            raise ConfigError(f"buffer.redis_url={self._where}: {HOW_TO_WRITE_ONE}") from None

    def heartbeat(self, status: ReplicaStatus, ttl_s: float) -> int:
        """Write a replica's heartbeat, which expires after `ttl_s` seconds. Returns how many
        replicas the deployment has."""
        with self._errors(), self._redis.pipeline() as pipe:
            pipe.set(self._replica_key(status.replica), encode(status), px=math.ceil(ttl_s * 1000))
            pipe.sadd(f"{self._prefix}:replicas", status.replica)
            pipe.scard(f"{self._prefix}:replicas")
            return int(pipe.execute()[-1])

    def replicas(self) -> list[ReplicaStatus]:
        """The newest heartbeats, sorted by name."""
        with self._errors():
            names = sorted(
                name.decode() for name in self._redis.smembers(f"{self._prefix}:replicas")
            )
            if not names:
                return []
            texts = self._redis.mget([self._replica_key(name) for name in names])
            gone = [names[place] for place, text in enumerate(texts) if text is None]
            if gone:
                self._redis.srem(f"{self._prefix}:replicas", *gone)
        found = [_decode_heartbeat(text) for text in texts if text is not None]
        return [status for status in found if status is not None]

    def forget(self, replica: str) -> None:
        """Remove what is known of a replica that has ended."""
        with self._errors(), self._redis.pipeline() as pipe:
            pipe.delete(self._replica_key(replica))
            pipe.srem(f"{self._prefix}:replicas", replica)
            pipe.execute()

    def set_members(self, members: Sequence[Member]) -> None:
        """Set which replicas the service has, and what they do."""
        with self._errors():
            self._redis.set(f"{self._prefix}:members", encode(list(members)))

    def members(self) -> list[Member]:
        """Which replicas the service has; [] when that is not known."""
        with self._errors():
            text = self._redis.get(f"{self._prefix}:members")
        return [] if text is None else _decode_or_none(text, list[Member]) or []

    def set_wanted(self, release: DraftRelease) -> None:
        """Set the release that every replica is to serve."""
        with self._errors():
            self._redis.set(self._wanted_key(release.draft), encode(release))

    def wanted(self, draft: str = "default", replica: str = "") -> DraftRelease | None:
        """The release that every replica is to serve, or that this one is to serve first; None when
        none is set or it cannot be decoded."""
        with self._errors():
            text, canary_text = self._redis.mget(self._wanted_key(draft), self._canary_key(draft))
        canary = None if canary_text is None else _decode_or_none(canary_text, Canary)
        if canary is not None and canary.replica == replica:
            return cast(DraftRelease, canary.release)
        return None if text is None else _decode_or_none(text, DraftRelease)

    def set_canary(self, canary: Canary | None, draft: str = "default") -> None:
        """Set what one replica serves before all others; None = nothing."""
        with self._errors():
            if canary is None:
                self._redis.delete(self._canary_key(draft))
            else:
                self._redis.set(self._canary_key(draft), encode(canary))

    def canary(self, draft: str = "default") -> Canary | None:
        """What one replica serves before all others."""
        with self._errors():
            text = self._redis.get(self._canary_key(draft))
        return None if text is None else _decode_or_none(text, Canary)

    def set_terms(self, terms: EngineTerms) -> None:
        """Tell attached engines what is switched on."""
        with self._errors():
            self._redis.set(f"{self._prefix}:terms", encode(terms))

    def terms(self) -> EngineTerms | None:
        """What attached engines are told; None when nothing is, or it cannot be decoded."""
        with self._errors():
            text = self._redis.get(f"{self._prefix}:terms")
        return None if text is None else _decode_or_none(text, EngineTerms)

    def note_purge(self) -> None:
        """Tell engines that traces were purged."""
        with self._errors():
            self._redis.incr(f"{self._prefix}:purges")

    def num_purges(self) -> int:
        """Purges so far. Where it changes, whichever way, there was one."""
        with self._errors():
            return int(self._redis.get(f"{self._prefix}:purges") or 0)

    def set_place(self, place: Place) -> None:
        """Note where a part of the service runs."""
        with self._errors():
            self._redis.hset(f"{self._prefix}:places", place.part, encode(place))

    def places(self) -> list[Place]:
        """Where each part was started last, sorted by name."""
        with self._errors():
            texts = self._redis.hvals(f"{self._prefix}:places")
        found = [_decode_or_none(text, Place) for text in texts]
        return sorted((place for place in found if place is not None), key=lambda p: p.part)

    def clear_place(self, part: str) -> None:
        """Forget where a part ran."""
        with self._errors():
            self._redis.hdel(f"{self._prefix}:places", part)

    def clear_places(self) -> None:
        """Forget where parts ran."""
        with self._errors():
            self._redis.delete(f"{self._prefix}:places")

    def publish(self, *records: FeedRecord, once: tuple[str, int] | None = None) -> None:
        """Append all records to the feed, or none, in order. After a `ReplayBufferError` they may
        have been appended all the same: with `once` (who sends, and a number that grows) they can
        be published again, and are appended once."""
        sent_at = time.time()
        with self._errors(), self._redis.pipeline() as pipe:
            if once is not None:
                key = f"{self._prefix}:published:{once[0]}"
                pipe.watch(key)
                if int(pipe.get(key) or 0) >= once[1]:
                    return
                pipe.multi()
                pipe.set(key, once[1], ex=PUBLISHED_TTL)
            for record in records:
                if isinstance(record, OF_REPLICAS):
                    record = replace(record, sent_at=sent_at)
                entry = {"type": type(record).__name__, "json": encode(record)}
                pipe.xadd(f"{self._prefix}:feed", entry, maxlen=self._feed_length)
            pipe.execute()

    def read(self, after: str = "0", count: int = 1000) -> list[tuple[str, FeedRecord]]:
        """The next `count` records behind the id `after`, oldest first; fewer where there are no
        more. Undecodable ones are skipped. What replicas sent has its times by this process's
        clock, whatever theirs is: the server's clock saw it come.

        Example:
            for last, record in registry.read(after=last):
                history.add(record)
        """
        found: list[tuple[str, FeedRecord]] = []
        while True:
            with self._errors(), self._redis.pipeline() as pipe:
                pipe.xrange(f"{self._prefix}:feed", min=f"({after}", count=count)
                pipe.time()
                entries, (seconds, microseconds) = pipe.execute()
            behind_s = round(time.time() - seconds - microseconds / 1e6)
            decoded = map(_decode_entry, entries)
            found += [(i, _by_our_clock(i, r, behind_s)) for i, r in decoded if r is not None]
            if len(found) >= count or len(entries) < count:
                return found[:count]
            after = entries[-1][0].decode()

    def newest(self) -> str:
        """The id of the newest record; "0" where there is none."""
        with self._errors():
            entries = self._redis.xrevrange(f"{self._prefix}:feed", count=1)
        return entries[0][0].decode() if entries else "0"

    def close(self) -> None:
        """Close the connections."""
        with self._errors():
            self._redis.close()

    def _replica_key(self, name: str) -> str:
        return f"{self._prefix}:replica:{name}"

    def _wanted_key(self, draft: str) -> str:
        return f"{self._prefix}:wanted:{draft}"

    def _canary_key(self, draft: str) -> str:
        return f"{self._prefix}:canary:{draft}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            text = mask_text(error, self._url) or type(error).__name__
            raise ReplayBufferError(f"Redis at {self._where} cannot be used: {text}") from None


def _decode_entry(entry: tuple[bytes, dict[bytes, bytes]]) -> tuple[str, FeedRecord | None]:
    entry_id, fields = entry
    record_type = FEED_TYPES.get(fields.get(b"type", b"").decode(errors="replace"))
    record = None if record_type is None else _decode_or_none(fields.get(b"json", b""), record_type)
    return entry_id.decode(), record


def _by_our_clock(entry_id: str, record: FeedRecord, behind_s: int) -> FeedRecord:
    """`behind_s`: how far the server's clock is behind this process's. Whole seconds, so that a
    record read again is the same, and one of a right clock is unchanged."""
    if not isinstance(record, OF_REPLICAS) or not record.sent_at:
        return record
    # Ids of a server whose clock was set back since lie in the future.
    came_at = min(int(entry_id.partition("-")[0]) / 1000 + behind_s, time.time())
    return replace(record, at=record.at + round(came_at - record.sent_at), sent_at=0.0)


def _decode_heartbeat(text: bytes) -> ReplicaStatus | None:
    """A report on speculation that cannot be read is left out: the replica lives all the same."""
    status: ReplicaStatus | None = _decode_or_none(text, ReplicaStatus)
    if status is None and isinstance(fields := _decode_or_none(text, dict), dict):
        status = _decode_or_none(encode({**fields, "speculation": None}), ReplicaStatus)
    return status


def _decode_or_none(text: bytes, record_type: type[Any]) -> Any:
    try:
        return decode(text, record_type)
    except ValueError:
        return None
