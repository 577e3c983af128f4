"""What a measured engine's scheduler writes down of a step, with a hand-written one beneath it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from osd.evaluate.recorder import Recording, Seen

K = 5


class Beneath:
    """Stands where the controlled scheduler does. Each method takes seconds of a clock that only
    they advance, some of them in the control."""

    num_spec_tokens = K

    def __init__(self, method: str | None = "draft_model") -> None:
        self.now = 0.0
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(method=method) if method else None
        )
        self.requests: dict[str, Any] = {}
        self.cut = K

    def osd_clock(self) -> float:
        return self.now

    def schedule(self, output: Any) -> Any:
        self._osd_guard(lambda: self.work(1.0))
        return self.work(2.0, output)

    def update_from_output(self, output: Any, result: Any) -> str:
        for tokens in result.sampled_token_ids:
            del tokens[1:]  # as vLLM does behind a stop
        self._osd_guard(lambda: self.work(4.0))
        return str(self.work(8.0, "outputs"))

    def update_draft_token_ids(self, drafts: Any) -> None:
        for tokens in drafts.draft_token_ids:
            tokens[:] = (tokens + [0] * K)[: self.cut]
        self.work(16.0)

    def work(self, seconds: float, result: Any = None) -> Any:
        self.now += seconds
        return result

    def _osd_guard(self, act: Callable[[], Any]) -> Any:
        return act()

    def _osd_lookup_table(self, k: int) -> list[int]:
        return [k] * 3


def scheduler(method: str | None = "draft_model", **num_output_tokens: int) -> Any:
    """With requests that have got so many tokens."""
    found: Any = type("Recorded", (Recording, Beneath), {})(method)
    found.requests = {
        req_id: SimpleNamespace(num_output_tokens=num) for req_id, num in num_output_tokens.items()
    }
    return found


def step(
    recorded: Any,
    drafts: Mapping[str, Sequence[int]],
    sampled: Mapping[str, Sequence[int]],
    *,
    more: Mapping[str, int] | None = None,
    invalid: Mapping[str, int] | None = None,
) -> Seen:
    """A step in which all requests that sampled verified their drafts, and some computed so many
    tokens `more`."""
    num = {req_id: 1 + len(drafts.get(req_id, ())) for req_id in sampled}
    for req_id, tokens in (more or {}).items():
        num[req_id] = num.get(req_id, 0) + tokens
    output = SimpleNamespace(
        num_scheduled_tokens=num,
        scheduled_spec_decode_tokens={req_id: list(tokens) for req_id, tokens in drafts.items()},
        num_invalid_spec_tokens=invalid,
    )
    result = SimpleNamespace(
        sampled_token_ids=[list(sampled.get(req_id, ())) for req_id in num],
        req_id_to_index={req_id: i for i, req_id in enumerate(num)},
    )
    assert recorded.schedule(output) is output
    assert recorded.update_from_output(output, result) == "outputs"
    seen: Seen = recorded.take()
    return seen


def test_each_request_has_what_it_verified_before_its_answer_was_cut() -> None:
    recorded = scheduler(a=3, b=9)
    seen = step(recorded, {"a": [5, 6, 7], "b": [8]}, {"a": [5, 6, 1], "b": [4]})
    assert seen.verified == {"a": (3, [5, 6, 7], 2), "b": (9, [8], 0)}
    assert (seen.batch, seen.width, seen.is_pure) == (2, 6, True)


def test_a_step_is_told_once() -> None:
    recorded = scheduler(a=3)
    assert step(recorded, {}, {"a": [5]}).batch == 1
    assert recorded.take() == Seen()
    assert step(recorded, {"a": [5]}, {"a": [5, 2]}).verified == {"a": (3, [5], 1)}


def test_places_of_drafts_that_were_none_are_no_drafts() -> None:
    """What a grammar forbids is scheduled all the same."""
    seen = step(scheduler(a=3), {"a": [5, 6, -1, -1]}, {"a": [5, 2]}, invalid={"a": 2})
    assert seen.verified == {"a": (3, [5, 6], 1)} and seen.width == 5 and seen.is_pure


def test_a_step_that_computes_a_prompt_does_not_only_decode() -> None:
    first = step(scheduler(a=3, new=0), {"a": [5]}, {"a": [5, 2], "new": [9]}, more={"new": 11})
    assert first.verified == {"a": (3, [5], 1), "new": (0, [], 0)}
    assert (first.batch, first.width, first.is_pure) == (2, 14, False)
    chunk = step(scheduler(a=3, new=0), {"a": [5]}, {"a": [5, 2]}, more={"new": 11})
    assert chunk.verified == {"a": (3, [5], 1)}
    assert (chunk.batch, chunk.width, chunk.is_pure) == (1, 13, False)
    assert not step(scheduler(new=0), {}, {"new": [9]}).is_pure  # the last token of a prompt


def test_a_step_that_computes_an_answer_again_does_not_only_decode() -> None:
    """vLLM puts a request off where its cache is full, and then has lost what it had computed."""
    assert not step(scheduler(a=3), {}, {"a": [5]}, more={"a": 20}).is_pure
    assert step(scheduler(a=3), {}, {"a": [5]}).is_pure


def test_who_has_left_within_the_step_is_counted_in_its_width_alone() -> None:
    seen = step(scheduler(a=3), {"gone": [5]}, {"a": [5], "gone": [5, 2]})
    assert list(seen.verified) == ["a"]
    assert (seen.batch, seen.width, seen.is_pure) == (1, 3, False)


def test_seconds_of_the_scheduler_and_of_the_control_are_told_apart() -> None:
    recorded = scheduler(a=3)
    seen = step(recorded, {}, {"a": [5]})
    assert (seen.scheduling, seen.own) == (15.0, 5.0)
    recorded.update_draft_token_ids(SimpleNamespace(draft_token_ids=[]))
    assert recorded.take() == Seen(scheduling=16.0)


def test_what_fails_has_taken_its_time_too() -> None:
    recorded = scheduler()

    def fail() -> None:
        recorded.work(3.0)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        recorded._osd_guard(fail)
    assert recorded.take().own == 3.0


@pytest.mark.parametrize(("cut", "proposed"), [(0, 4), (2, 5), (K, 10)])
def test_proposed_are_drafts_that_were_cut_and_those_that_the_memory_added(
    cut: int, proposed: int
) -> None:
    recorded = scheduler()
    recorded.cut = cut
    drafts = SimpleNamespace(draft_token_ids=[[5, 6, 7], [8]])
    recorded.update_draft_token_ids(drafts)
    assert [len(tokens) for tokens in drafts.draft_token_ids] == [cut, cut]
    assert recorded.take().proposed == proposed


@pytest.mark.parametrize(
    ("method", "k"), [("suffix", K), ("ngram", 2), ("draft_model", 2), (None, 2)]
)
def test_suffix_decoding_alone_is_always_asked_for_the_longest_draft(
    method: str | None, k: int
) -> None:
    assert scheduler(method)._osd_lookup_table(2) == [k] * 3
