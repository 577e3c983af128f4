"""Parts of a step, by the scopes that vLLM enters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from osd.evaluate.worker import ORDER, MeasuredWorker, StepParts


class SuffixCache:
    """Stands where arctic-inference's does."""

    def __init__(self, *, max_tree_depth: int, max_cached_requests: int) -> None:
        self.limits = max_tree_depth, max_cached_requests
        self.cached = list[str]()


def worker(**drafter: Any) -> Any:
    found: Any = MeasuredWorker()
    config = SimpleNamespace(
        suffix_decoding_max_tree_depth=24, suffix_decoding_max_cached_requests=9
    )
    found.vllm_config = SimpleNamespace(speculative_config=config)
    found.model_runner = SimpleNamespace(drafter=SimpleNamespace(**drafter))
    return found


def test_suffix_decoding_forgets_what_it_has_cached_and_keeps_its_limits() -> None:
    suffix = worker(suffix_cache=SuffixCache(max_tree_depth=1, max_cached_requests=1))
    suffix.model_runner.drafter.suffix_cache.cached.append("an answer")
    suffix.osd_forget()
    cache = suffix.model_runner.drafter.suffix_cache
    assert (cache.cached, cache.limits) == ([], (24, 9))
    other = worker()
    other.osd_forget()
    assert other.model_runner.drafter == SimpleNamespace()


def test_each_step_has_its_own_seconds_of_each_part() -> None:
    now = [0.0]
    parts = StepParts(lambda: now[0])

    def enter(name: str, seconds: float) -> None:
        with parts.scope(f"gpu_model_runner: {name}"):
            now[0] += seconds

    enter("draft", 9.0)  # of a step that began before it was timed
    for factor in (1, 10):
        enter("preprocess", 1.0 * factor)
        enter("forward", 2.0 * factor)
        enter("sample", 3.0 * factor)
        enter("draft", 4.0 * factor)
        enter("bookkeep", 5.0 * factor)
        enter("something else", 100.0)
    assert ORDER == ("draft", "verify", "sample", "other")
    assert parts.take() == [[4.0, 2.0, 3.0, 6.0], [40.0, 20.0, 30.0, 60.0]]
    assert parts.take() == []
