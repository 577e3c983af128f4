"""What the memory of a real engine proposes of what others were served, and to whom.

A text is planted: one request is served it. Another one then asks the same. Where it may not be
proposed the text, it must be proposed just what an engine proposes that never served it, and its
answer must take as many steps: those are what an outsider sees as time. What engines have in common
are their chances: how often tokens of a kind were right, which are counts without any text.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from buffers.memory import MemoryTraceBuffer
from buffers.recent import newest_shared
from osd.config.schema import CaptureConfig, Config
from osd.records import Trace
from serving.speculation.client import SpeculationClient
from serving.speculation.goodput import Plan
from serving.speculation.memory.warm import Warming
from tests.integration.conftest import release_of
from tests.integration.serving.test_lossless import drafted_samples, misfit, target
from tests.support.engines import Engine
from tests.support.pairs import VOCABULARY, Pair

__all__ = ["target"]

K = 8
LENGTH = 48
ANSWER: dict[str, Any] = {"ignore_eos": True, "max_tokens": LENGTH}
NUM_PLANTED = 6
OPT_OUT = {"extra_args": {"osd_capture": "off"}}
SALT = {"cache_salt": "of one client"}
NUM_TIMES = 3
"""Times that each is asked, of which the fastest counts."""
KEPT: list[Engine] = []
"""vLLM takes down what all engines of a process share when one of them is collected."""


def memory_alone(pair: Pair) -> Engine:
    """Every step verifies what the memory proposes."""
    engine = Engine(pair.target, release_of(pair.draft, 1), k=K, control={}, disable_log_stats=True)
    KEPT.append(engine)
    engine.start_hooks(CaptureConfig(top_k=16))
    engine.command("force", ("memory", K))
    return engine


@pytest.fixture(scope="module")
def engines(pair: Pair, plain: Engine) -> tuple[Engine, Engine]:
    return memory_alone(pair), memory_alone(pair)


@pytest.fixture(scope="module")
def prompts_24() -> list[list[int]]:
    """Of 24 tokens each."""
    random = np.random.default_rng(11)
    return [random.integers(2, VOCABULARY, 24).tolist() for _ in range(2 * NUM_PLANTED)]


@pytest.fixture
def common(prompts_24: list[list[int]]) -> list[list[int]]:
    """What everybody asks."""
    return prompts_24[:NUM_PLANTED]


@pytest.fixture
def planted(prompts_24: list[list[int]]) -> list[list[int]]:
    """What leads to the planted texts."""
    return prompts_24[NUM_PLANTED:]


@pytest.fixture
def one(engines: tuple[Engine, Engine], common: list[list[int]]) -> Iterator[Engine]:
    """The engine that texts are planted in."""
    yield from begun(engines[0], common)


@pytest.fixture
def other(engines: tuple[Engine, Engine], common: list[list[int]]) -> Iterator[Engine]:
    """An engine that never serves them."""
    yield from begun(engines[1], common)


def begun(engine: Engine, common: list[list[int]]) -> Iterator[Engine]:
    engine.command("forget")
    engine.command("force", ("memory", K))
    engine.llm.reset_prefix_cache()
    engine.generate(common, **ANSWER)
    engine.traces()
    yield engine
    assert engine.command("report")["problem"] == ""


class Asked(NamedTuple):
    """What an outsider sees of an answer, and what was proposed for it."""

    answer: list[int]
    num_steps: int
    seconds: float
    proposals: list[list[int]]


def ask(engine: Engine, prompt: Sequence[int], **given: Any) -> Asked:
    """Ask for the prompt's answer alone, and leave nothing behind."""
    engine.llm.reset_prefix_cache()
    steps: list[int] = []
    engine.add(prompt, **OPT_OUT, **ANSWER, **given)
    with overheard(engine) as outputs:
        started = time.perf_counter()
        ((answer,),) = engine.run(steps.append).values()
        seconds = time.perf_counter() - started
    proposals = [list(t) for o in outputs for t in o.scheduled_spec_decode_tokens.values()]
    return Asked(answer, len(steps), seconds, proposals)


def ask_both(
    engines: tuple[Engine, Engine], prompts: Sequence[Sequence[int]], **given: Any
) -> tuple[list[Asked], list[Asked]]:
    """Ask both engines, in turns, so that both meet the same noise."""
    found: tuple[list[Asked], list[Asked]] = [], []
    for prompt in prompts:
        runs = [[ask(engine, prompt, **given) for engine in engines] for _ in range(NUM_TIMES)]
        for asked, mine in zip(found, zip(*runs, strict=True), strict=True):
            assert len({tuple(run.answer) for run in mine}) == 1
            asked.append(mine[0]._replace(seconds=min(run.seconds for run in mine)))
    return found


@contextmanager
def overheard(engine: Engine) -> Iterator[list[Any]]:
    """What is scheduled, step by step."""
    outputs: list[Any] = []
    own = engine.scheduler.update_from_output

    def overhear(output: Any, result: Any) -> Any:
        outputs.append(output)
        return own(output, result)

    engine.scheduler.update_from_output = overhear
    try:
        yield outputs
    finally:
        del engine.scheduler.update_from_output


def plant(engine: Engine, prompts: Sequence[Sequence[int]], **given: Any) -> None:
    for prompt in prompts:
        engine.add(prompt, **ANSWER, **given)
    engine.run()


def share_chances(one: Engine, other: Engine) -> None:
    """What the one has learnt of kinds of tokens, the other one knows, too."""
    given, taken = (engine.scheduler.osd.memory._cells for engine in (one, other))
    for counts, others in zip(given, taken, strict=True):
        others[:] = counts


def assert_proposed(found: Sequence[Asked], never: Sequence[Asked]) -> None:
    """The planted texts are proposed from their beginning, and come in a fraction of the time."""
    for mine, others in zip(found, never, strict=True):
        assert mine.answer == others.answer
        first = mine.proposals[0]
        assert len(first) >= 4 and first == mine.answer[1 : 1 + len(first)]
        assert first not in others.proposals
        assert mine.num_steps < 0.5 * others.num_steps
    assert seconds(found) < 0.6 * seconds(never)


def assert_not_proposed(found: Sequence[Asked], never: Sequence[Asked]) -> None:
    """Nothing tells them from answers of an engine that never served the texts."""
    for mine, others in zip(found, never, strict=True):
        assert mine.answer == others.answer
        assert mine.proposals == others.proposals
        assert mine.num_steps == others.num_steps
    assert 0.6 < seconds(found) / seconds(never) < 1 / 0.6


def seconds(found: Sequence[Asked]) -> float:
    return sum(asked.seconds for asked in found)


# ------------------------------------------------------------------------------------ planted texts


def test_what_one_was_served_another_is_proposed(
    one: Engine, other: Engine, planted: list[list[int]]
) -> None:
    """That the planted texts are found at all is what the tests below rest on."""
    plant(one, planted)
    found, never = ask_both((one, other), planted)
    assert_proposed(found, never)
    print(f"{[a.num_steps for a in found]} steps, and {[a.num_steps for a in never]}", end=", ")
    print(f"{seconds(found):.3f} s, and {seconds(never):.3f} s")


@pytest.mark.parametrize("given", [OPT_OUT, SALT], ids=["opted out", "salted"])
def test_what_one_keeps_for_itself_nobody_is_proposed(
    one: Engine, other: Engine, planted: list[list[int]], given: dict[str, Any]
) -> None:
    plant(one, planted, **given)
    share_chances(one, other)
    assert_not_proposed(*ask_both((one, other), planted))
    plant(one, planted)
    assert_proposed(*ask_both((one, other), planted))


def test_who_has_the_salt_is_proposed_it_and_who_has_another_is_not(
    one: Engine, other: Engine, planted: list[list[int]]
) -> None:
    plant(one, planted, **SALT)
    share_chances(one, other)
    assert_not_proposed(*ask_both((one, other), planted, cache_salt="of another"))
    assert_proposed(*ask_both((one, other), planted, **SALT))


def test_chances_alone_do_not_tell_what_was_planted(
    one: Engine, other: Engine, planted: list[list[int]]
) -> None:
    """They are learnt of all that is served: a step more or less, as after any other text."""
    plant(one, planted, **OPT_OUT)
    steps, never = (sum(ask(engine, p).num_steps for p in planted) for engine in (one, other))
    assert steps == pytest.approx(never, rel=0.05)


def test_what_was_purged_nobody_is_proposed(
    one: Engine, other: Engine, planted: list[list[int]]
) -> None:
    """Not even the chances are left of it."""
    plant(one, planted)
    assert ask(one, planted[0]).num_steps < LENGTH / 4, "it would have been"
    for engine in (one, other):
        engine.command("forget")
    assert_not_proposed(*ask_both((one, other), planted))


# ------------------------------------------------------------------------------------ after a start


class Restart:
    """An engine that begins anew, beside a buffer with traces of the one before."""

    def __init__(self, engine: Engine, traces: Sequence[Trace]) -> None:
        self.buffer, self.purges = MemoryTraceBuffer(target_id="target"), 0
        assert self.buffer.put(traces) == len(traces)
        self.engine = engine
        engine.command("forget")
        client = SpeculationClient(self._utility, Config())
        self.warming = Warming(self.read, client, self, Config())  # type: ignore[arg-type]
        self.meanwhile: Callable[[], None] = lambda: None

    def read(self, num_tokens: int) -> Iterator[list[Trace]]:
        for traces in newest_shared(self.buffer, num_tokens):
            self.meanwhile()
            yield traces

    async def _utility(self, _: str, name: str, argument: str) -> str:
        return str(self.engine.scheduler.osd_command(name, argument))

    def num_purges(self) -> int:
        return self.purges

    def purge(self) -> None:
        self.buffer.purge()
        self.purges += 1

    def finish(self) -> None:
        while not self.warming.is_done:
            asyncio.run(self.warming.go_on(0))


def trained_on(traces: Sequence[Trace], planted: Sequence[list[int]]) -> list[list[int]]:
    """One in eight is held out, and not read."""
    known = [trace.prompt_ids.tolist() for trace in traces if not trace.is_holdout]
    found = [prompt for prompt in planted if prompt in known]
    assert found, "all are held out"
    return found


def test_after_a_restart_the_first_requests_are_proposed_what_was_served_before(
    one: Engine, other: Engine, planted: list[list[int]]
) -> None:
    plant(one, planted)
    traces = one.traces()
    one.command("forget")
    Restart(other, traces).finish()
    warm, cold = ask_both((other, one), trained_on(traces, planted))
    assert_proposed(warm, cold)
    print(f"{[a.num_steps for a in warm]} steps, and {[a.num_steps for a in cold]} cold")


@pytest.mark.parametrize("given", [SALT, OPT_OUT, None], ids=["salted", "opted out", "purged"])
def test_but_not_what_was_kept_apart_or_purged_while_it_was_read(
    one: Engine, other: Engine, planted: list[list[int]], given: dict[str, Any] | None
) -> None:
    plant(one, planted, **(given or {}))
    traces = one.traces()
    assert len(traces) == (0 if given == OPT_OUT else NUM_PLANTED)
    one.command("forget")
    restart = Restart(other, traces)
    if given is None:
        restart.meanwhile = restart.purge
    restart.finish()
    assert_not_proposed(*ask_both((other, one), planted))


# ----------------------------------------------------------------------- three sources in one batch


@pytest.fixture
def at_random(one: Engine) -> Iterator[Engine]:
    """In each step each request is proposed the draft's tokens, the memory's or nothing, as it
    falls out."""
    control, random = one.scheduler.osd, np.random.default_rng(0)

    def look_up(req_id: str) -> list[int]:
        num = int(random.integers(1, K + 1))
        return control.memory.propose(req_id, num).tokens if random.random() < 0.4 else []

    control.look_up = look_up
    control.cap = lambda req_id: int(max(0, random.integers(-2, 5)))
    one.command("force", list(Plan("draft", 4, is_mixed=True)))
    yield one
    del control.look_up, control.cap


def sources_of(engine: Engine, output: Any) -> Counter[str]:
    """Decoding requests of a step by who proposed for them."""
    found: Counter[str] = Counter()
    for req_id, num in output.num_scheduled_tokens.items():
        drafted = output.scheduled_spec_decode_tokens.get(req_id, ())
        if num == 1 + len(drafted) and req_id not in new_in(output):
            source = "memory" if req_id in output.osd_from_memory else "draft"
            found[source if drafted else "nothing"] += 1
    return found


def new_in(output: Any) -> set[str]:
    return {request.req_id for request in output.scheduled_new_reqs}


def num_with_all(engine: Engine, outputs: Sequence[Any]) -> int:
    """Steps that verify tokens of both, beside requests for which nothing was proposed."""
    return sum(len(sources_of(engine, output)) == 3 for output in outputs)


def test_at_temperature_zero_three_sources_in_one_batch_change_no_token(
    at_random: Engine, plain: Engine, prompts: list[list[int]]
) -> None:
    with overheard(at_random) as outputs:
        for _ in range(2):  # the second time, the memory knows all
            assert at_random.generate(prompts, **ANSWER) == plain.generate(prompts, **ANSWER)
    assert num_with_all(at_random, outputs) > LENGTH / 2


def test_at_temperature_one_three_sources_in_one_batch_follow_the_target(
    at_random: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    with overheard(at_random) as outputs:
        samples = drafted_samples(at_random, prompts, 1.0)
    assert num_with_all(at_random, outputs) > 20
    total = sum((sources_of(at_random, output) for output in outputs), Counter())
    assert min(total[source] for source in ("draft", "memory", "nothing")) > 1000, total
    assert misfit(target, samples, 1.0) > 1e-4
    assert misfit(target, samples, 0.8) < 1e-6, "samples are too few to tell temperatures apart"
