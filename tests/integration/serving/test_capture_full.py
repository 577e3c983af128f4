"""Hard cases of capture on real vLLM: preemption, grammars, rows picked without looking."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from osd.observe.exposition import Totals
from osd.records import ACCEPTED, PLAIN, ReplicaStatus, Trace
from serving.capture import pick
from tests.integration.serving.test_capture import assert_rows_are_the_targets, keep_all
from tests.support.engines import Engine
from tests.support.pairs import Pair


@pytest.fixture(scope="module")
def target(pair: Pair) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def generate_and_count_preemptions(
    engine: Engine, prompts: Sequence[Sequence[int]], **sampling: object
) -> int:
    """Run all prompts together; how often vLLM's scheduler took a running request's cache away."""
    preemptions: Counter[str] = Counter()

    def look(step: int) -> None:
        for request in scheduler(engine).requests.values():
            preemptions[request.request_id] = max(
                preemptions[request.request_id], request.num_preemptions
            )

    for prompt in prompts:
        engine.add(prompt, **sampling)
    engine.run(look)
    return preemptions.total()


def by_prompt(traces: Sequence[Trace]) -> dict[tuple[int, ...], Trace]:
    found = {tuple(trace.prompt_ids.tolist()): trace for trace in traces}
    assert len(found) == len(traces)
    return found


def test_a_preempted_request_leaves_the_trace_of_an_undisturbed_one(
    engine: Engine, tight: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    keep_all(engine)
    some = prompts[:12]
    assert generate_and_count_preemptions(engine, some, ignore_eos=True, max_tokens=80) == 0
    undisturbed = by_prompt(engine.traces())
    assert generate_and_count_preemptions(tight, some, ignore_eos=True, max_tokens=80) >= 10
    preempted = by_prompt(tight.traces())
    assert preempted.keys() == undisturbed.keys() == {tuple(prompt) for prompt in some}
    for prompt, expected in undisturbed.items():
        got = preempted[prompt]
        assert got.output_ids.tolist() == expected.output_ids.tolist()
        # Each position once, and the row is the target's distribution there, whether it was
        # computed once or twice.
        assert got.position.tolist() == list(range(len(prompt), len(prompt) + 80))
        assert got.target_ids[:, 0].tolist() == expected.target_ids[:, 0].tolist()
        np.testing.assert_allclose(
            got.target_logprobs.astype(np.float32),
            expected.target_logprobs.astype(np.float32),
            atol=2e-2,
        )
        # Nothing is counted twice; the engine's counts include what was verified beyond the end.
        assert 0 <= got.num_accepted_tokens - (got.kind == ACCEPTED).sum() <= tight.k
    assert assert_rows_are_the_targets(target, list(preempted.values())) == 12 * 80
    # What differs: the draft's proposals are thrown away with the cache, so the first token
    # afterwards was not drafted.
    plain = {
        name: sum((t.kind == PLAIN).sum() for t in traces.values())
        for name, traces in (("undisturbed", undisturbed), ("preempted", preempted))
    }
    assert plain["preempted"] > plain["undisturbed"]
    assert tight.worker.osd_capture.assembler.skipped["gap"] == 0


def test_preemption_at_a_temperature_keeps_tokens_and_rows_together(
    tight: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    num = generate_and_count_preemptions(
        tight, prompts[:12], ignore_eos=True, max_tokens=80, temperature=1.0, seed=3
    )
    assert num >= 10
    assert assert_rows_are_the_targets(target, tight.traces()) == 12 * 80


def test_a_request_with_a_grammar_is_left_out_and_its_neighbours_are_not(
    tight: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    before = tight.worker.osd_capture.assembler.skipped["structured_output"]
    constrained = tight.add(
        prompts[0],
        structured_outputs=StructuredOutputsParams(choice=["t5", "t6"]),
        max_tokens=4,
        ignore_eos=False,
    )
    tight.add(prompts[1], ignore_eos=True)
    done = tight.run()
    assert done[constrained][0][0] in (5, 6)  # the grammar was in force
    traces = tight.traces()
    assert [t.prompt_ids.tolist() for t in traces] == [prompts[1]]
    assert_rows_are_the_targets(target, traces)
    report = json.loads(tight.rpc("osd_report", "replica-0", "default"))
    assert report["skipped"]["structured_output"] == before + 1
    totals = Totals()
    totals.observe([status_of(report)], None)
    counted = f'osd_capture_skipped_total{{reason="structured_output"}} {before + 1}.0'
    assert counted in totals.render()


def test_a_request_for_an_adapter_of_the_target_is_left_out(
    tight: Engine, pair: Pair, prompts: list[list[int]], tmp_path: Path
) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pair.target), LoraConfig(r=8, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path)
    before = tight.worker.osd_capture.assembler.skipped["target_adapter"]
    tight.llm.llm_engine.add_request(
        "adapted",
        {"prompt_token_ids": prompts[0]},
        SamplingParams(temperature=0.0, max_tokens=8, detokenize=False),
        lora_request=LoRARequest("adapter", 1, str(tmp_path)),
    )
    tight.add(prompts[1], ignore_eos=True)
    tight.run()
    assert [t.prompt_ids.tolist() for t in tight.traces()] == [prompts[1]]
    assert tight.worker.osd_capture.assembler.skipped["target_adapter"] == before + 1


def status_of(report: dict[str, dict[str, int]]) -> ReplicaStatus:
    """The heartbeat a replica makes of its worker's report."""
    return ReplicaStatus(
        at=1.0,
        replica="replica-0",
        url="",
        version=1,
        target_id="target",
        k=4,
        pid=1,
        started_at=0.0,
        engine="",
        capture_skipped=report["skipped"],
    )


def test_rows_picked_without_looking_make_the_same_traces(
    engine: Engine, target: torch.nn.Module, prompts: list[list[int]]
) -> None:
    """The way for devices, which never reads what was sampled, on the CPU: same draw, same
    traces."""
    capture = engine.worker.osd_capture
    engine.set_capture(accepted_fraction=0.5, plain_fraction=0.3)
    found: list[dict[tuple[int, ...], Trace]] = []
    chosen = capture._pick
    try:
        for way in (pick.pick_on_host, pick.pick_later, pick.pick_on_device):
            capture._random = np.random.default_rng(11)
            capture._pick = way
            engine.llm.reset_prefix_cache()
            engine.generate(prompts, ignore_eos=True, max_tokens=40)
            found.append(by_prompt(engine.traces()))
    finally:
        capture._pick = chosen
    host, *others = found
    assert all(other.keys() == host.keys() for other in others)
    for got, expected in ((other[prompt], host[prompt]) for other in others for prompt in host):
        for name in (
            "output_ids",
            "position",
            "kind",
            "draft_ids",
            "target_ids",
            "keep_prob",
            "draft_version",
        ):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
        np.testing.assert_allclose(got.tail_logprob, expected.tail_logprob, atol=1e-5)
    assert assert_rows_are_the_targets(target, list(others[-1].values())) > 200


def test_vllm_on_cpus_schedules_synchronously_also_when_asked_not_to(tight: Engine) -> None:
    """Should a release of vLLM lift this, capture has to be run under it: so far it was on
    synchronous steps alone."""
    assert tight.llm.llm_engine.vllm_config.scheduler_config.async_scheduling is False
