"""One speculating and one plain vLLM engine, shared by all tests of this folder that need real vLLM
in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from osd.config.schema import CaptureConfig
from osd.records import DraftRelease
from tests.support.engines import SINK, Engine
from tests.support.pairs import VOCABULARY, Pair, build_pair

ReleaseOf = Callable[..., DraftRelease]


def release_of(path: Path, version: int) -> DraftRelease:
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    return DraftRelease(
        version=version,
        parent=version - 1,
        path=str(path),
        sha256=digest,
        target_id="target",
        created_at=0.0,
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def speculating(pair: Pair, plain: Engine) -> Engine:
    """k = 4, capture on, at most 384 tokens a step. Built after `plain`: vLLM's metrics are the
    newest engine's."""
    engine = Engine(pair.target, release_of(pair.draft, 1), max_num_batched_tokens=384)
    engine.start_hooks(CaptureConfig(top_k=16))
    return engine


@pytest.fixture
def engine(speculating: Engine, pair: Pair) -> Iterator[Engine]:
    """The speculating engine with the first draft live and nothing captured yet."""
    if speculating.worker.osd_swapper.version != 1:
        assert speculating.swap(release_of(pair.draft, 1))["error"] == ""
    speculating.llm.reset_prefix_cache()
    speculating.traces()
    speculating.rpc("osd_report", "test", "default")
    SINK.clear()
    yield speculating
    speculating.set_capture(**CaptureConfig(top_k=16).model_dump())


@pytest.fixture(scope="session")
def plain(pair: Pair) -> Engine:
    """The same target without speculation."""
    return Engine(pair.target, None, disable_log_stats=True)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 prompts of 5 to 60 tokens."""
    random = np.random.default_rng(7)
    return [random.integers(2, VOCABULARY, random.integers(5, 60)).tolist() for _ in range(24)]


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, plain: Engine) -> tuple[Engine, Pair]:
    """An engine whose draft has its output head tied to its embedding, as small models often have.
    It lives to the end: vLLM takes down what all engines of a process share when one of them is
    collected."""
    pair = build_pair(tmp_path_factory.mktemp("tied"), tied=True)
    engine = Engine(pair.target, release_of(pair.draft, 1), disable_log_stats=True)
    engine.start_hooks(CaptureConfig(top_k=16))
    return engine, pair


@pytest.fixture(scope="session")
def tight(pair: Pair, plain: Engine) -> Engine:
    """A KV cache of 448 tokens, so that requests are preempted as soon as a few are long; with a
    tokenizer, so that grammars work, with room for an adapter, and asked to schedule
    asynchronously."""
    engine = Engine(
        pair.target,
        release_of(pair.draft, 1),
        disable_log_stats=True,
        skip_tokenizer_init=False,
        block_size=32,
        num_gpu_blocks_override=14,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        async_scheduling=True,
    )
    engine.start_hooks(CaptureConfig(top_k=16, accepted_fraction=1.0, plain_fraction=1.0))
    return engine
