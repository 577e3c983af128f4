"""One engine for each way in which vLLM runs, and the same tests over all of them.

The fixtures have the names of those a folder above, so that tests written for one engine run over
all ways when a module of this folder imports them. What runs on vLLM's V2 model runner, or over
several ranks, runs in a process of its own, which this pytest starts. With `-n`, the tests of a way
stay together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from osd.config.schema import CaptureConfig
from serving.vllm import undrafted
from tests.integration.conftest import release_of
from tests.integration.engines import matrix
from tests.support import interpreter
from tests.support.asked import CHANNEL
from tests.support.elsewhere import Elsewhere, run_elsewhere
from tests.support.engines import Engine
from tests.support.headed import build_headed, form_of_heads
from tests.support.pairs import VOCABULARY, Pair, build_pair
from tests.support.ranked_engines import RankedEngine
from tests.support.reference import K, Reference
from tests.support.ways import EXACT, WAYS, Way

KEPT: list[Engine] = []
"""vLLM takes down what all engines of a process share when one of them is collected."""
OTHERS: dict[str, Elsewhere] = {}
"""By the name of the way. Only that of the newest way is kept: its engines take memory."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    way = way_of(item)
    if way is None or not is_run_elsewhere(way) or CHANNEL in os.environ:
        return None
    run_elsewhere(item, nextitem, lambda: process_of(way))
    return True


def is_run_elsewhere(way: Way) -> bool:
    """Whether the way wants another environment, or workers that are forked from a process in which
    no engine of another kind has run."""
    return way.runner == "V2" or way.num_ranks > 1


def process_of(way: Way) -> Elsewhere:
    if way.name not in OTHERS:
        close_others()
        environment = interpreter.ENVIRONMENT if way.runner == "V2" else {}
        OTHERS[way.name] = Elsewhere(str(Path(__file__).parent), environment)
    return OTHERS[way.name]


def close_others() -> None:
    while OTHERS:
        OTHERS.popitem()[1].close()


def pytest_sessionfinish() -> None:
    close_others()


def way_of(item: pytest.Item) -> Way | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("way") if callspec is not None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what a way does not run, as `matrix.py` says. All of this folder is slow, and
    belongs to a stage of `scripts/test_slow`."""
    folder = Path(__file__).parent
    items[:] = [item for item in items if item.path.parent != folder or is_run(item)]
    for item in items:
        if item.path.parent == folder:
            way = way_of(item)
            item.add_marker("slow")
            item.add_marker(way.stage if way is not None else "v1")


def is_run(item: pytest.Item) -> bool:
    way = way_of(item)
    return way is None or matrix.is_run(getattr(item, "originalname", item.name), way)


class ByWay(LoadScopeScheduling):
    """Tests with the same first parameter go to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        test, _, parameters = nodeid.partition("[")
        named = [way.name for way in WAYS if parameters.rstrip("]").startswith(way.name)]
        return named[0] if named else test.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByWay:
    return ByWay(config, log)


# ----------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session", params=EXACT, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(scope="session")
def crowd() -> list[list[int]]:
    """8 prompts of 5 to 40 tokens, too many for the cache of `tight`."""
    random = np.random.default_rng(7)
    return [random.integers(2, VOCABULARY, random.integers(5, 40)).tolist() for _ in range(8)]


@pytest.fixture(scope="session")
def prompts(crowd: list[list[int]]) -> list[list[int]]:
    """6 of them: interpreted kernels take a tenth of a second a request and step."""
    return crowd[:6]


@pytest.fixture(scope="session")
def reference(pair: Pair) -> Reference:
    return Reference(pair)


@pytest.fixture(scope="session")
def plain(reference: Reference) -> Reference:
    """The same target without speculation, on the V1 runner, synchronous, in float32."""
    return reference


@pytest.fixture(scope="session")
def speculating(pair: Pair, way: Way) -> Engine:
    """k of at most 4, under control, capture on, at most 384 tokens a step."""
    return started(pair, way, max_num_batched_tokens=384)


@pytest.fixture
def engine(engine: Engine, reference: Reference) -> Iterator[Engine]:
    """As above, with k fixed at 4; at the end the control and the hooks must be whole."""
    engine.command("force", ["draft", K])
    yield engine
    engine.traces()  # nothing is left for the engine that is asked next
    assert engine.command("report")["problem"] == ""
    assert engine.worker.osd_hook.is_listening


@pytest.fixture(scope="session")
def tied(
    tmp_path_factory: pytest.TempPathFactory, way: Way, speculating: Engine
) -> tuple[Engine, Pair]:
    pair = build_pair(tmp_path_factory.mktemp("tied"), tied=True)
    engine = started(pair, way, disable_log_stats=True)
    engine.command("force", ["draft", K])
    return engine, pair


@pytest.fixture(scope="session")
def tight(pair: Pair, way: Way, speculating: Engine) -> Engine:
    """A KV cache of 256 tokens, so that requests are preempted."""
    engine = started(
        pair,
        way,
        disable_log_stats=True,
        max_model_len=160,
        block_size=32,
        num_gpu_blocks_override=9,
    )
    engine.command("force", ["draft", K])
    engine.set_capture(accepted_fraction=1.0, plain_fraction=1.0)
    return engine


@pytest.fixture(scope="session")
def drawing(pair: Pair, way: Way) -> Engine:
    """Draft tokens are drawn from the draft's distribution. All ids of a row are captured."""
    sampled = {"draft_sample_method": "probabilistic"}
    engine = started(pair, way, speculative=sampled, max_num_batched_tokens=384)
    engine.set_capture(top_k=VOCABULARY, accepted_fraction=1.0, plain_fraction=1.0)
    return engine


@pytest.fixture
def sampling(drawing: Engine, pair: Pair) -> Iterator[Engine]:
    """As above, with k fixed at 4; at the end the control and the hooks must be whole."""
    yield from whole(drawing, pair)


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory, way: Way) -> Pair:
    form = form_of_heads(way)
    return build_headed(tmp_path_factory.mktemp(f"headed-{way.name}"), **form)


@pytest.fixture(scope="session")
def alone(headed: Pair) -> Reference:
    """The same target without speculation."""
    return Reference(headed)


@pytest.fixture(scope="session")
def drafting(headed: Pair, way: Way) -> Engine:
    undrafted.refuse_undrafted()
    engine = started(
        headed, way, speculative={"method": "eagle3"}, max_num_batched_tokens=384, max_num_seqs=16
    )
    core = engine.llm.llm_engine.engine_core.engine_core
    problems = [engine.rpc("osd_undrafted"), core.osd_undrafted()]
    undrafted.permit(engine.llm.llm_engine.vllm_config.speculative_config, problems)
    return engine


@pytest.fixture
def head(drafting: Engine, headed: Pair) -> Iterator[Engine]:
    """An engine whose head proposes 4 tokens; at the end control and hooks must be whole."""
    yield from whole(drafting, headed)


@pytest.fixture(scope="session")
def drawing_head(headed: Pair, way: Way) -> Engine:
    """Draft tokens are drawn from a head's distribution. All ids of a row are captured."""
    sampled = {"method": "eagle3", "draft_sample_method": "probabilistic"}
    engine = started(headed, way, speculative=sampled, max_num_batched_tokens=384, max_num_seqs=16)
    engine.set_capture(top_k=VOCABULARY, accepted_fraction=1.0, plain_fraction=1.0)
    return engine


@pytest.fixture
def sampling_head(drawing_head: Engine, headed: Pair) -> Iterator[Engine]:
    """As above, with k fixed at 4; at the end control and hooks must be whole."""
    yield from whole(drawing_head, headed)


@pytest.fixture(scope="session")
def deep(headed: Pair) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(headed.target, dtype=torch.float32).eval()


def whole(engine: Engine, pair: Pair) -> Iterator[Engine]:
    """The engine with the first draft and k = 4; afterwards its control and hooks must be whole."""
    engine.command("force", ("draft", K))
    engine.llm.reset_prefix_cache()
    if engine.worker.osd_swapper.version != 1:
        assert engine.swap(release_of(pair.draft, 1))["error"] == ""
    yield engine
    engine.traces()
    assert engine.command("report")["problem"] == ""
    assert engine.worker.osd_hook.is_listening
    assert engine.worker.osd_off == {}


def started(pair: Pair, way: Way, **options: Any) -> Engine:
    with logged("serving.speculation.scheduler") as said:
        kind = Engine if way.num_ranks == 1 else RankedEngine
        engine = kind(pair.target, release_of(pair.draft, 1), k=K, control={}, way=way, **options)
    engine.said = said
    KEPT.append(engine)
    engine.start_hooks(CaptureConfig(top_k=16))
    return engine


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What a logger says meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)
