"""Captured traces, on real vLLM, against a plain forward pass of the target."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from osd.records import ACCEPTED, PLAIN, REJECTED, Trace
from serving.vllm.hooks import Verification
from tests.integration.conftest import release_of
from tests.support.engines import Engine
from tests.support.pairs import Pair
from trainer.batch import is_believable
from trainer.sampling.teacher import Teacher


@pytest.fixture(scope="module")
def target(pair: Pair) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


def expected_logprobs(target: torch.nn.Module, trace: Trace) -> np.ndarray:
    """[N, V]: the target's log-softmax for each captured position, from one plain forward pass."""
    ids = np.concatenate([trace.prompt_ids, trace.output_ids]).astype(np.int64)
    with torch.no_grad():
        logprobs = target(torch.from_numpy(ids[None])).logits[0].log_softmax(-1).numpy()
    return logprobs[trace.position - 1]


def assert_rows_are_the_targets(target: torch.nn.Module, traces: Sequence[Trace]) -> int:
    """Ids, log-probabilities, tail, position, kind and draft token of every row; returns the number
    of rows."""
    num_rows = 0
    for trace in traces:
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids])
        expected = expected_logprobs(target, trace)
        for i in range(trace.num_rows):
            top = np.sort(expected[i])[::-1][: trace.target_ids.shape[1]]
            np.testing.assert_allclose(
                trace.target_logprobs[i].astype(np.float32), top, atol=2e-2, rtol=2e-3
            )
            np.testing.assert_allclose(expected[i][trace.target_ids[i]], top, atol=1e-3)
            rest = np.delete(expected[i], trace.target_ids[i])
            np.testing.assert_allclose(trace.tail_logprob[i], np.logaddexp.reduce(rest), atol=2e-3)
            served = tokens[trace.position[i]]
            assert {
                REJECTED: trace.draft_ids[i] not in (-1, served),
                ACCEPTED: trace.draft_ids[i] == served,
                PLAIN: trace.draft_ids[i] == -1,
            }[int(trace.kind[i])]
        # Of one in some thousand tokens drawn at temperature 1 so little was to be expected.
        most = int(trace.temperature > 0)
        assert (~is_believable(trace)).sum() <= most, "what was captured will be trained on"
        num_rows += trace.num_rows
    return num_rows


def keep_all(engine: Engine) -> None:
    engine.set_capture(accepted_fraction=1.0, plain_fraction=1.0)


def test_rows_equal_a_plain_forward_pass_of_the_target(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    outputs = engine.generate(prompts, ignore_eos=True)
    traces = engine.traces()
    assert sorted(t.output_ids.tolist() for t in traces) == sorted(outputs)
    assert {tuple(t.prompt_ids) for t in traces} == {tuple(p) for p in prompts}
    # Every output position was captured exactly once, since all rows were kept.
    for trace in traces:
        first = len(trace.prompt_ids)
        assert trace.position.tolist() == list(range(first, first + len(trace.output_ids)))
    assert assert_rows_are_the_targets(target, traces) == sum(len(o) for o in outputs)
    kinds = np.concatenate([t.kind for t in traces])
    assert min((kinds == kind).sum() for kind in (REJECTED, ACCEPTED, PLAIN)) > 10


def test_the_trainers_teacher_gives_the_rows_that_were_captured(
    engine: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    """Within 0.02 and 0.2 % of log-probabilities in float16, from all requests packed together."""
    keep_all(engine)
    engine.generate(prompts, ignore_eos=True)
    captured = engine.traces()
    texts = [trace.with_rows(trace.position < 0) for trace in captured]
    top_k = captured[0].target_ids.shape[1]
    labelled = Teacher(pair.target, top_k=top_k, dtype="float32").label(texts)
    for trace, found in zip(captured, labelled, strict=True):
        assert found.position.tolist() == trace.position.tolist()
        np.testing.assert_allclose(
            found.target_logprobs.astype(np.float32),
            trace.target_logprobs.astype(np.float32),
            atol=2e-2,
            rtol=2e-3,
        )
        np.testing.assert_allclose(found.tail_logprob, trace.tail_logprob, atol=2e-3)
        # Tokens alike but where two are as likely as each other.
        swapped_NK = found.target_ids != trace.target_ids
        assert swapped_NK.mean() < 0.01


def test_rows_stay_right_under_chunked_prefill_and_prefix_cache_hits(
    engine: Engine, target: torch.nn.Module
) -> None:
    keep_all(engine)
    random = np.random.default_rng(3)
    shared = random.integers(2, 90, 150).tolist()
    long_prompts = [shared + random.integers(2, 90, 20 + i).tolist() for i in range(6)]
    engine.generate(long_prompts[:1])  # fills the prefix cache
    engine.traces()
    # 6 x 170 tokens, in chunks of 384.
    outputs = engine.generate(long_prompts, ignore_eos=True, max_tokens=12)
    traces = engine.traces()
    assert sorted(t.output_ids.tolist() for t in traces) == sorted(outputs)
    assert assert_rows_are_the_targets(target, traces) == 6 * 12


def test_each_sample_of_a_request_is_a_trace_of_its_own(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    engine.add(prompts[0], n=3, temperature=1.0, seed=5, max_tokens=16)
    samples = next(iter(engine.run().values()))
    traces = engine.traces()
    assert len(traces) == 3
    assert sorted(t.output_ids.tolist() for t in traces) == sorted(samples)
    assert len({t.trace_id for t in traces}) == 3
    assert {t.temperature for t in traces} == {1.0}
    assert_rows_are_the_targets(target, traces)


def test_an_aborted_request_leaves_a_correct_trace_of_what_was_served(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    whole = engine.generate(prompts[:4], ignore_eos=True, max_tokens=60)
    engine.traces()
    ids = [engine.add(prompt, ignore_eos=True, max_tokens=60) for prompt in prompts[:4]]
    engine.run(lambda step: engine.abort(ids[1]) if step == 6 else None)
    by_prompt = {tuple(t.prompt_ids): t for t in engine.traces()}
    aborted = by_prompt[tuple(prompts[1])]
    assert 0 < len(aborted.output_ids) < 60
    assert aborted.output_ids.tolist() == whole[1][: len(aborted.output_ids)]
    assert_rows_are_the_targets(target, [aborted])


def test_tokens_past_the_end_of_a_request_are_not_captured(
    engine: Engine, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    free = engine.generate(prompts, ignore_eos=True, max_tokens=30)
    engine.traces()
    # The last token that first appears in each output.
    stop = [max(set(output), key=output.index) for output in free]
    ids = [
        engine.add(p, stop_token_ids=[s], max_tokens=30, ignore_eos=True)
        for p, s in zip(prompts, stop, strict=True)
    ]
    outputs = engine.run()
    served = {tuple(p): outputs[i][0] for p, i in zip(prompts, ids, strict=True)}
    traces = engine.traces()
    assert {tuple(t.prompt_ids): t.output_ids.tolist() for t in traces} == served
    for trace in traces:
        assert trace.position.max() < len(trace.prompt_ids) + len(trace.output_ids)


def test_an_opted_out_request_leaves_counts_and_nothing_else(
    engine: Engine, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    secret = [7, 11, 13, 17, 19, 23, 29, 31]
    engine.add(secret, extra_args={"osd_capture": "off"}, ignore_eos=True)
    engine.add(prompts[0], ignore_eos=True)
    engine.run()
    traces = engine.traces()
    assert [t.prompt_ids.tolist() for t in traces] == [prompts[0]]
    report = json.loads(engine.rpc("osd_report", "test", "default"))
    assert sum(w["num_output_tokens"] for w in report["windows"]) == 48
    # It counts for load and speed, but a draft is not judged on what leaves no trace.
    assert sum(w["num_drafts"] for w in report["windows"]) > traces[0].num_drafts
    assert sum(w["num_tested_per_pos"][0] for w in report["windows"]) == traces[0].num_drafts
    assert report["skipped"]["opted_out"] >= 1


def test_counters_equal_vllms_own(engine: Engine, prompts: list[list[int]]) -> None:
    before = {m.name: m for m in engine.llm.get_metrics() if "spec_decode" in m.name}
    engine.rpc("osd_drain")
    engine.rpc("osd_report", "test", "default")
    engine.generate(prompts, ignore_eos=True)
    after = {m.name: m for m in engine.llm.get_metrics() if "spec_decode" in m.name}
    engine.rpc("osd_drain")
    windows = json.loads(engine.rpc("osd_report", "test", "default"))["windows"]
    for ours, theirs in (
        ("num_drafts", "vllm:spec_decode_num_drafts"),
        ("num_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
        ("num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
    ):
        assert sum(w[ours] for w in windows) == after[theirs].value - before[theirs].value > 0


def test_each_row_carries_the_version_that_proposed_it(
    engine: Engine, pair: Pair, prompts: list[list[int]]
) -> None:
    """The draft tokens verified in the step after the swap had been proposed before it."""
    keep_all(engine)
    ids = [engine.add(prompt, ignore_eos=True, max_tokens=40) for prompt in prompts[:6]]
    proposed_before: dict[str, int] = {}
    capture, own = engine.worker.osd_capture, engine.worker.osd_capture.on_verify

    def overhear(step: Verification) -> None:
        own(step)
        if capture.draft_version == 2 and not proposed_before:
            for b, req_id in enumerate(step.req_ids):
                num_emitted = int((step.sampled_BG[b] >= 0).sum())
                proposed_before[req_id.split("-")[0]] = int(step.first_position_B[b]) + num_emitted

    def swap(step: int) -> None:
        if step == 5:
            assert engine.swap(release_of(pair.stranger, 2))["error"] == ""

    capture.on_verify = overhear
    try:
        engine.run(swap)
    finally:
        del capture.on_verify
    traces = {tuple(trace.prompt_ids.tolist()): trace for trace in engine.traces()}
    assert len(traces) == len(proposed_before) == 6
    for prompt, req_id in zip(prompts, ids, strict=False):
        trace = traces[tuple(prompt)]
        is_before = trace.position < proposed_before[req_id]
        assert trace.draft_version.tolist() == np.where(is_before, 1, 2).tolist()
        assert 0 < is_before.sum() < len(is_before) == 40
    report = json.loads(engine.rpc("osd_report", "test", "default"))
    alphas = {
        w["version"]: sum(w["num_accepted_tokens_per_pos"]) / sum(w["num_tested_per_pos"])
        for w in report["windows"]
    }
    assert alphas[1] > 0.3 > 0.15 > alphas[2]


def test_sampled_rows_keep_the_promised_fraction(engine: Engine, prompts: list[list[int]]) -> None:
    engine.set_capture(accepted_fraction=1.0, plain_fraction=1.0)
    engine.generate(prompts, ignore_eos=True, max_tokens=60)
    everything = np.concatenate([t.kind for t in engine.traces()])
    engine.set_capture(accepted_fraction=0.25, plain_fraction=0.5)
    engine.generate(prompts, ignore_eos=True, max_tokens=60)
    traces = engine.traces()
    kept = np.concatenate([t.kind for t in traces])
    keep_prob = np.concatenate([t.keep_prob for t in traces])
    assert (kept == REJECTED).sum() == (everything == REJECTED).sum()
    for kind, fraction in ((ACCEPTED, 0.25), (PLAIN, 0.5)):
        total = int((everything == kind).sum())
        spread = 4 * np.sqrt(total * fraction * (1 - fraction))
        assert abs((kept == kind).sum() - total * fraction) < spread
        assert (keep_prob[kept == kind] == np.float32(fraction)).all()


def test_a_spent_budget_drops_traces_and_counts_them(
    engine: Engine, prompts: list[list[int]]
) -> None:
    assembler = engine.worker.osd_capture.assembler
    budget = assembler._budget
    assembler._budget = type(budget)(8192)
    try:
        before = assembler.skipped["budget"]
        outputs = engine.generate(prompts, ignore_eos=True)
        traces = engine.traces()
        assert assembler.skipped["budget"] - before + len(traces) == len(prompts)
        assert 0 < sum(t.num_bytes for t in traces) < 3 * 8192
        assert all(len(output) == 24 for output in outputs)
    finally:
        assembler._budget = budget


@pytest.mark.parametrize("broken", ["_take", "on_schedule"])
def test_a_failing_hook_costs_no_request(
    engine: Engine, plain: Engine, prompts: list[list[int]], broken: str
) -> None:
    capture, hook = engine.worker.osd_capture, engine.worker.osd_hook
    before = capture.assembler.skipped["hook_error"]
    setattr(capture, broken, lambda *args: 1 / 0)
    try:
        assert engine.generate(prompts[:4], ignore_eos=True) == plain.generate(
            prompts[:4], ignore_eos=True
        )
        assert capture.assembler.skipped["hook_error"] == before + 1
        assert not hook.is_listening
    finally:
        delattr(capture, broken)
        hook.is_listening = True
        engine.generate(prompts[:1])
        engine.traces()
