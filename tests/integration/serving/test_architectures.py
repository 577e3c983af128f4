"""The whole loop on pairs of other architectures.

They serve, are captured, trained, judged, published and swapped in, and serve better. The targets'
embeddings have more rows than the drafts', as in pairs of real models: first releases are padded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from buffers.memory import MemoryTraceBuffer
from osd.config.schema import CaptureConfig, Config, GateConfig, TrainerConfig
from osd.control.policy import should_publish
from osd.errors import ConfigError
from osd.models.compatibility import check_context
from osd.records import REJECTED, DraftRelease, RoundOutcome, SpecWindow, Trace, decode
from osd.releases.store import ReleaseStore
from osd.service.plan import first_release
from tests.integration.conftest import release_of
from tests.support.builders import trace_id
from tests.support.engines import SINK, Engine
from tests.support.shapes import PADDED, SHAPES, VOCABULARY, add_old_masks, build_pair
from trainer.draft import load_draft
from trainer.evaluate import ReplayCounts, replay
from trainer.loop import Trainer
from trainer.loss import LOSSES

TRAINING = TrainerConfig(device="cpu", learning_rate=3e-3, min_new_traces=16)
LORA = TRAINING.model_copy(update={"method": "lora", "learning_rate": 9e-3})
GATE = GateConfig(min_holdout_traces=4)
CAPTURE = CaptureConfig(top_k=16, max_bytes_per_second=1 << 40)


@dataclass
class Loop:
    """An engine and everything that makes its draft better."""

    engine: Engine
    draft: Path
    """As it was before it was published."""
    store: ReleaseStore
    release: DraftRelease

    def serve(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[Trace], SpecWindow]:
        """Answers, traces (every fourth held out), and counters of these prompts alone."""
        self.engine.llm.reset_prefix_cache()
        self.engine.rpc("osd_report", "test", "default")
        answers = self.engine.generate(prompts, ignore_eos=True, max_tokens=24)
        found = sorted(self.engine.traces(), key=lambda trace: trace.prompt_ids.tolist())
        traces = [replace(t, trace_id=trace_id(i, holdout=i % 4 == 0)) for i, t in enumerate(found)]
        (window,) = json.loads(self.engine.rpc("osd_report", "test", "default"))["windows"]
        return answers, traces, decode(json.dumps(window), SpecWindow)

    def train(
        self,
        traces: list[Trace],
        base: DraftRelease,
        directory: Path,
        training: TrainerConfig = TRAINING,
    ) -> RoundOutcome:
        """One round of a new trainer."""
        buffer = MemoryTraceBuffer(target_id="target")
        assert buffer.put(traces) == len(traces)
        with drafts_beside(self.engine):
            return Trainer(training, GATE, self.engine.k, buffer, directory, "target").run_round(
                base
            )

    def publish(self, outcome: RoundOutcome) -> DraftRelease:
        """The candidate, which must pass the gate."""
        decision = should_publish(outcome, self.release, GATE, pinned=False)
        assert decision.ok, decision.reason
        self.release = self.store.publish(
            outcome.path, parent=outcome.base_version, target_id="target", outcome=outcome
        )
        return self.release

    def replay(self, draft: Path, traces: list[Trace]) -> ReplayCounts:
        with drafts_beside(self.engine):
            return replay(load_draft(draft), traces, self.engine.k, max_length=512)


@contextmanager
def drafts_beside(engine: Engine) -> Iterator[None]:
    """vLLM decorates the class it borrows from transformers for GPT-NeoX: in its process, which
    here is the trainer's too, that class can be built only where vLLM's configuration is set."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(engine.worker.vllm_config):
        yield


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """64 prompts of 4 to 12 tokens."""
    random = np.random.default_rng(11)
    return [random.integers(0, VOCABULARY, random.integers(4, 12)).tolist() for _ in range(64)]


@pytest.fixture(scope="session", params=list(SHAPES))
def loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    directory = tmp_path_factory.mktemp(request.param)
    target, draft = build_pair(directory, SHAPES[request.param])
    if request.param.startswith("gpt-neox"):
        add_old_masks(draft)
    config = Config(data_dir=str(directory / "data"))
    release = first_release(config, draft, "target", PADDED)
    engine = Engine(target, release, disable_log_stats=True, kv_cache_memory_bytes=16 << 20)
    request.config.stash.setdefault(ENGINES, []).append(engine)
    engine.start_hooks(CAPTURE)
    return Loop(engine, draft, ReleaseStore(config.releases_path), release)


ENGINES = pytest.StashKey[list[Engine]]()
"""Engines live to the end: vLLM takes down what all engines of a process share when one of them is
collected."""


def counts(window: SpecWindow | ReplayCounts) -> tuple[list[int], list[int]]:
    """Draft tokens tested and accepted, per position."""
    if isinstance(window, SpecWindow):
        return list(window.num_tested_per_pos), list(window.num_accepted_tokens_per_pos)
    return window.tested_RG.sum(0).tolist(), window.accepted_RG.sum(0).tolist()


def test_a_padded_draft_learns_from_what_it_served_and_serves_better(
    loop: Loop, prompts: list[list[int]], tmp_path: Path
) -> None:
    SINK.clear()
    checksum = loop.engine.rpc("osd_target_checksum")
    answers, traces, before = loop.serve(prompts)
    # Padding is never proposed: the draft without any, which vLLM would not take, does exactly as
    # well.
    assert counts(before) == counts(loop.replay(loop.draft, traces))

    release = loop.publish(loop.train(traces, loop.release, tmp_path))
    swapped = loop.engine.swap(release)
    assert (swapped["error"], swapped["proved"]) == ("", True)
    again, traces, after = loop.serve(prompts)

    assert again == answers
    assert before.alpha is not None and before.alpha < 0.35
    assert after.alpha is not None and after.alpha > 0.6
    assert counts(after) == counts(loop.replay(Path(release.path), traces))
    assert loop.engine.rpc("osd_target_checksum") == checksum


@pytest.mark.parametrize("loop", ["llama-tied"], indirect=True)
def test_traces_whose_prompts_were_cut_teach_as_well(loop: Loop, tmp_path: Path) -> None:
    random = np.random.default_rng(12)
    prompts = [random.integers(0, VOCABULARY, random.integers(40, 80)).tolist() for _ in range(48)]
    loop.engine.set_capture(max_context=16, accepted_fraction=1.0, plain_fraction=1.0)
    _, traces, _ = loop.serve(prompts)
    loop.engine.set_capture(**CAPTURE.model_dump())
    assert {len(trace.prompt_ids) for trace in traces} == {16}
    assert {trace.num_rows for trace in traces} == {24}
    for trace in traces:
        tokens = np.concatenate([trace.prompt_ids, trace.output_ids])
        assert (trace.target_ids[:, 0] == tokens[trace.position]).all(), (
            "at temperature 0 the best token is served"
        )
    report = loop.train(traces, loop.store.get(1), tmp_path).eval
    assert report is not None and report.alpha_base < 0.35
    assert report.alpha_candidate > 0.6


@pytest.mark.parametrize("loop", ["llama-tied"], indirect=True)
def test_one_request_longer_than_the_drafts_context_would_stop_drafting_for_all(
    request: pytest.FixtureRequest, loop: Loop, prompts: list[list[int]], tmp_path: Path
) -> None:
    """What vLLM does, and why `osd/models/compatibility.py` refuses such a draft."""
    shutil.copytree(loop.release.path, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 48})
    )
    target = Path(loop.engine.llm.llm_engine.model_config.model)
    engine = Engine(
        target,
        release_of(tmp_path / "short", 1),
        disable_log_stats=True,
        kv_cache_memory_bytes=16 << 20,
    )
    request.config.stash[ENGINES].append(engine)
    engine.start_hooks(CAPTURE)
    short = replace(loop, engine=engine)
    _, traces, alone = short.serve(prompts[:4])
    assert alone.alpha is not None and alone.alpha > 0.6
    _, traces, together = short.serve([*prompts[:4], [*range(40)]])
    assert together.alpha is not None and together.alpha < 0.4
    late = [trace for trace in traces if len(trace.prompt_ids) < 40]
    assert sum((trace.draft_ids[trace.kind == REJECTED] == 0).sum() for trace in late) > 20
    with pytest.raises(ConfigError, match="context of 48 tokens, the target serves 256"):
        check_context(
            {"max_position_embeddings": 256}, {"max_position_embeddings": 48}, tmp_path, None
        )


def test_every_release_has_the_names_and_the_dtypes_of_the_first_draft(loop: Loop) -> None:
    """Also those that transformers knows by other names, or not at all."""
    assert loop.release.version > 1
    assert shapes_of(Path(loop.release.path)) == shapes_of(Path(loop.store.get(1).path))
    own = shapes_of(loop.draft)
    padded = {
        name: (dtype, [PADDED if n == VOCABULARY else n for n in shape])
        for name, (dtype, shape) in own.items()
    }
    assert shapes_of(Path(loop.release.path)) == padded
    first, newest = (
        load_file(loop.store.get(v).path + "/model.safetensors") for v in (1, loop.release.version)
    )
    same = {name for name in first if torch.equal(first[name], newest[name])}
    assert same == {
        name for name in first if name.endswith(("attention.bias", "masked_bias", "inv_freq"))
    }


def learns(loop: Loop, prompts: list[list[int]], directory: Path, training: TrainerConfig) -> float:
    """The first draft serves, learns from that in one round, and serves what it learnt. Returns
    the gain in α."""
    loop.release = first = loop.store.get(1)
    assert loop.engine.swap(first)["error"] == ""
    answers, traces, before = loop.serve(prompts)
    release = loop.publish(loop.train(traces, first, directory, training))
    swapped = loop.engine.swap(release)
    assert (swapped["error"], swapped["proved"], release.kind) == ("", True, training.method)
    again, traces, after = loop.serve(prompts)
    assert again == answers
    assert counts(after) == counts(loop.replay(Path(release.path), traces))
    assert shapes_of(Path(release.path)) == shapes_of(Path(first.path))
    assert before.alpha is not None and after.alpha is not None
    return after.alpha - before.alpha


def test_adapters_learn_in_the_linear_layers_of_each_architecture(
    loop: Loop, prompts: list[list[int]], tmp_path: Path
) -> None:
    """LoRA. What it releases is a plain draft."""
    assert learns(loop, prompts, tmp_path, LORA) > 0.3


@pytest.mark.parametrize("loop", ["llama-tied"], indirect=True)
@pytest.mark.parametrize("loss", sorted({*LOSSES} - {TRAINING.loss}))
def test_each_other_loss_teaches_what_is_then_served(
    loop: Loop, prompts: list[list[int]], tmp_path: Path, loss: str
) -> None:
    training = TRAINING.model_copy(update={"loss": loss})
    assert learns(loop, prompts, tmp_path, training) > 0.3


def shapes_of(directory: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), list(part.get_shape())) for name, part in slices.items()}
