"""A draft asleep, over all ways of running vLLM: it makes as many passes as k says, none at k = 0,
and afterwards proposes what it would have, had it never slept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from serving.speculation.net import SETTLING_STEPS
from serving.speculation.sleep import v1, v2
from tests.support.engines import Engine
from tests.support.pairs import VOCABULARY
from tests.support.ranked_engines import RankedPasses
from tests.support.reference import K, Reference

PLANS = [*(("draft", k) for k in range(1, K + 1)), ("off", 0), ("off", 0)]
NUM_SLEPT = 12


@pytest.fixture
def sleeper(engine: Engine) -> Iterator[Engine]:
    """With nothing cached; the draft must still be able to sleep at the end."""
    engine.llm.reset_prefix_cache()
    yield engine
    assert not engine.worker.osd_lazy_draft.is_off


class Passes:
    """How often the draft ran, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.per_step: list[int] = []
        self._num = 0
        self._handle = engine.worker.get_draft_model().register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._num += 1

    def next_step(self, _step: int) -> None:
        self.per_step.append(self._num)
        self._num = 0

    def close(self) -> None:
        self._handle.remove()


@pytest.fixture
def passes(sleeper: Engine) -> Iterator[Passes | RankedPasses]:
    counted = Passes(sleeper) if sleeper.way.num_ranks == 1 else RankedPasses(sleeper)
    yield counted
    counted.close()


@pytest.mark.parametrize("k", range(K, -1, -1))
def test_the_draft_makes_as_many_passes_as_k_says(
    sleeper: Engine, prompts: list[list[int]], passes: Passes, k: int
) -> None:
    sleeper.command("force", ("draft", k) if k else ("off", 0))
    sleeper.add(prompts[0], ignore_eos=True, max_tokens=8 * (k + 1))
    sleeper.run(passes.next_step)
    ran = [num for num in passes.per_step if num] if k else passes.per_step
    assert set(ran) == {k}
    assert len(ran) >= 8


def test_a_window_without_speculation_holds_no_pass_of_the_draft(
    sleeper: Engine, prompts: list[list[int]], passes: Passes
) -> None:
    def stop(step: int) -> None:
        passes.next_step(step)
        if step == 4:
            sleeper.command("force", ("off", 0))

    sleeper.add(prompts[0], ignore_eos=True, max_tokens=60)
    sleeper.run(stop)
    assert K in passes.per_step[:4]
    window = passes.per_step[4 + SETTLING_STEPS :]
    assert len(window) >= 10
    assert set(window) == {0}


class Proposals:
    """What the draft proposed, by request and by the number of tokens before the proposal."""

    def __init__(self, engine: Engine) -> None:
        self.found: dict[tuple[str, int], list[int]] = {}
        self._runner = engine.worker.model_runner
        self._is_v2 = engine.way.runner == "V2"
        self._owner = self._runner.speculator if self._is_v2 else self._runner.drafter
        self._own = self._owner.propose
        self._owner.propose = self.propose_v2 if self._is_v2 else self.propose_v1

    def close(self) -> None:
        self._owner.propose = self._own

    def propose_v1(self, **given: Any) -> torch.Tensor:
        k, metadata = given["num_speculative_tokens"], given["common_attn_metadata"]
        rejected = given["num_rejected_tokens_gpu"]
        ends = metadata.seq_lens.clone() - (0 if rejected is None else rejected)
        drafts = self._own(**given)
        self._keep(self._runner.input_batch.req_ids, ends, drafts, k)
        return drafts

    def propose_v2(self, batch: Any, *given: Any, **named: Any) -> torch.Tensor:
        drafts = self._own(batch, *given, **named)
        ends = self._runner.req_states.num_computed_tokens.gpu[batch.idx_mapping]
        self._keep(batch.req_ids, ends, drafts, named.get("num_speculative_tokens") or 0)
        return drafts

    def _keep(
        self, req_ids: Sequence[str], ends: torch.Tensor, drafts: torch.Tensor, k: int
    ) -> None:
        if k:
            for req_id, end, ids in zip(req_ids, ends.tolist(), drafts.tolist(), strict=True):
                self.found[req_id.split("-")[0], end] = ids[:k]


@pytest.fixture
def proposed_by(sleeper: Engine) -> Iterator[Callable[..., list[dict[int, list[int]]]]]:
    """What is proposed for each prompt, by position, under a plan per step."""
    kept: list[Proposals] = []

    def run(
        prompts: Sequence[list[int]],
        plans: dict[int, tuple[str, int]],
        num_tokens: int,
        **sampling: float,
    ) -> list[dict[int, list[int]]]:
        proposals = Proposals(sleeper)
        kept.append(proposals)

        def plan(step: int) -> None:
            if step in plans:
                sleeper.command("hold", plans[step] == HELD)
                sleeper.command("force", None if plans[step] == HELD else plans[step])

        plan(0)

        sampling |= {"ignore_eos": True, "max_tokens": num_tokens}
        ids = [sleeper.add(p, **sampling) for p in prompts]
        sleeper.run(plan)
        proposals.close()
        return [{n: d for (r, n), d in proposals.found.items() if r == req} for req in ids]

    yield run
    sleeper.command("hold", False)
    for proposals in kept:
        proposals.close()


HELD = ("held", 0)
"""As vLLM speculates by itself: with its largest k, whatever was decided."""
AWAKE = {0: ("draft", 1)}
"""A pass in every step; proposals of one token depend on all positions before them as any do."""
SLEEPS = {
    "from the start": {0: ("off", 0), NUM_SLEPT: ("draft", 1)},
    "after drafting": {0: ("draft", K), 4: ("off", 0), 4 + NUM_SLEPT: ("draft", 1)},
    "for one step": {0: ("draft", K), 4: ("off", 0), 5: ("draft", 1), 8: ("off", 0)}
    | {9: ("draft", K), 11: ("off", 0), 12: ("draft", 1)},
    "for two steps": {0: ("draft", K), 3: ("off", 0), 5: ("draft", 1), 7: ("off", 0)}
    | {9: ("draft", K), 10: ("off", 0), 12: ("draft", 1)},
    "with penalties": {0: ("draft", K), 4: ("off", 0), 4 + NUM_SLEPT: ("draft", 1)},
    "until it is held": {0: ("off", 0), NUM_SLEPT: HELD},
    "after it was held": {0: HELD, 4: ("off", 0), 4 + NUM_SLEPT: ("draft", 1)},
}
SAMPLING = {"with penalties": {"repetition_penalty": 1.1}}
"""For penalties, vLLM tells the host afterwards what was written."""


def common(
    slept: list[dict[int, list[int]]], awake: list[dict[int, list[int]]]
) -> list[tuple[list[int], list[int]]]:
    """The first token proposed at each position at which both proposed."""
    pairs = zip(slept, awake, strict=True)
    return [(s[n][:1], a[n][:1]) for s, a in pairs for n in s if n in a]


@pytest.mark.parametrize("sleep", SLEEPS)
def test_after_a_sleep_the_draft_proposes_what_it_would_have(
    sleeper: Engine,
    prompts: list[list[int]],
    proposed_by: Any,
    sleep: str,
) -> None:
    some, sampling = prompts[:3], SAMPLING.get(sleep, {})
    awake = every_position(sleeper, proposed_by, some, **sampling)
    sleeper.llm.reset_prefix_cache()
    before = sleeper.worker.osd_lazy_draft.num_tokens_caught_up
    slept = proposed_by(some, SLEEPS[sleep], 36, **sampling)
    assert sleeper.worker.osd_lazy_draft.num_tokens_caught_up > before
    both = common(slept, awake)
    assert len(both) > 20
    assert [s for s, _ in both] == [a for _, a in both]


def every_position(
    sleeper: Engine,
    proposed_by: Any,
    prompts: list[list[int]],
    num_tokens: int = 36,
    **sampling: float,
) -> list[dict[int, list[int]]]:
    """What an awake draft proposes after each token: clients let none of its tokens be verified, so
    that each step brings one."""
    own, cap = sleeper.add, {"extra_args": {"osd_spec_k": 0}}
    sleeper.add = lambda *given, **named: own(*given, **named, **cap)  # type: ignore[method-assign]
    try:
        return proposed_by(prompts, AWAKE, num_tokens, **sampling)
    finally:
        del sleeper.add  # type: ignore[method-assign]


def test_without_catching_up_it_proposes_something_else(
    sleeper: Engine,
    prompts: list[list[int]],
    proposed_by: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = prompts[:3]
    awake = every_position(sleeper, proposed_by, some)
    sleeper.llm.reset_prefix_cache()
    for each in (v1.LazyDraftV1, v2.LazyDraftV2):
        monkeypatch.setattr(each, "_catch_up", lambda *_: None)
    both = common(proposed_by(some, SLEEPS["after drafting"], 36), awake)
    assert [s for s, _ in both] != [a for _, a in both]


def test_tokens_are_the_targets_while_the_draft_sleeps_and_wakes_at_random(
    sleeper: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    """Two requests are aborted, and two more begin meanwhile."""
    long = {"ignore_eos": True, "max_tokens": 30}
    random = np.random.default_rng(0)
    aborted = [sleeper.add(prompt, **long) for prompt in prompts[4:6]]
    ids = [sleeper.add(prompt, **long) for prompt in prompts[:3]]

    def change(step: int) -> None:
        sleeper.command("force", PLANS[random.integers(len(PLANS))])
        if step == 6:
            sleeper.abort(aborted[0])
            ids.append(sleeper.add(prompts[3], **long))
        if step == 9:
            sleeper.abort(aborted[1])

    before = sleeper.worker.osd_lazy_draft.num_tokens_caught_up
    done = sleeper.run(change)
    assert [done[i][0] for i in ids] == plain.generate(prompts[:4], **long)
    assert sleeper.worker.osd_lazy_draft.num_tokens_caught_up > before


def test_preempted_requests_keep_their_tokens_and_their_drafts(
    tight: Engine, plain: Reference, prompts: list[list[int]]
) -> None:
    long = {"ignore_eos": True, "max_tokens": 60}
    some = [prompt for prompt in prompts if len(prompt) >= 12][:4]
    random = np.random.default_rng(1)
    num_preempted = 0
    own = tight.scheduler._preempt_request

    def count(*given: Any, **named: Any) -> Any:
        nonlocal num_preempted
        num_preempted += 1
        return own(*given, **named)

    tight.scheduler._preempt_request = count
    try:
        ids = [tight.add(prompt, **long) for prompt in some]
        done = tight.run(lambda _: tight.command("force", PLANS[random.integers(len(PLANS))]))
    finally:
        del tight.scheduler._preempt_request
    assert num_preempted > 0
    assert [done[i][0] for i in ids] == plain.generate(some, **long)
    assert not tight.worker.osd_lazy_draft.is_off
    assert tight.worker.osd_lazy_draft.num_tokens_caught_up > 0


def test_cached_prefixes_that_the_draft_slept_through_are_caught_up_once(
    sleeper: Engine, proposed_by: Any
) -> None:
    prompt = np.random.default_rng(3).integers(2, VOCABULARY, 150).tolist()
    lazy = sleeper.worker.osd_lazy_draft
    fresh = proposed_by([prompt], {0: ("draft", K)}, 16)
    sleeper.llm.reset_prefix_cache()
    sleeper.command("force", ("off", 0))
    # Its blocks stay in the cache, but the draft never wrote them.
    sleeper.generate([prompt], max_tokens=2)
    before = lazy.num_tokens_caught_up
    assert proposed_by([prompt], {0: ("draft", K)}, 16) == fresh
    assert lazy.num_tokens_caught_up - before >= 128, "not from the cache, or not caught up"
    before = lazy.num_tokens_caught_up
    assert proposed_by([prompt], {0: ("draft", K)}, 16) == fresh
    assert lazy.num_tokens_caught_up == before
