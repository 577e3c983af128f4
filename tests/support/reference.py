"""What every way of running vLLM is compared with: the V1 runner, scheduling synchronously.

    generate   tokens of an engine that does not speculate
    traces     what the hooks capture of an engine that speculates

In a process that runs V2 the reference has a process of its own, without Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from osd.records import Trace
from tests.support import interpreter
from tests.support.pairs import Pair

if TYPE_CHECKING:
    from tests.support.engines import Engine

K = 4


class Reference:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._process = None
        if interpreter.is_asked_for():
            self._process = ProcessPoolExecutor(
                1, mp_context=get_context("spawn"), initializer=interpreter.leave
            )

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
        """Token ids of one sample per prompt, all prompts in flight together."""
        return self._ask(_generate, prompts, sampling)

    def traces(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Trace]:
        """With k fixed, all rows kept and 16 ids a row."""
        return self._ask(_traces, prompts, sampling)

    def _ask(self, act: Callable[..., Any], *given: Any) -> Any:
        if self._process is None:
            return act(self._pair, *given)
        return self._process.submit(act, self._pair, *given).result()


def _generate(pair: Pair, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
    return plain_engine(pair).generate(prompts, **sampling)


def _traces(pair: Pair, prompts: list[list[int]], sampling: dict[str, Any]) -> list[Trace]:
    engine = _speculating(pair)
    engine.llm.reset_prefix_cache()
    engine.generate(prompts, **sampling)
    return engine.traces()


@cache
def plain_engine(pair: Pair) -> Engine:
    from tests.support.engines import Engine

    return Engine(pair.target, None, disable_log_stats=True)


@cache
def _speculating(pair: Pair) -> Engine:
    from osd.config.schema import CaptureConfig
    from tests.integration.conftest import release_of
    from tests.support.engines import Engine

    engine = Engine(pair.target, release_of(pair.draft, 1), k=K, disable_log_stats=True)
    engine.start_hooks(CaptureConfig(top_k=16, accepted_fraction=1.0, plain_fraction=1.0))
    return engine
