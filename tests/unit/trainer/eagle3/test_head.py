"""The head on batches equals a head that drafts token by token, from plain formulas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from osd.models import eagle3
from osd.records import Trace
from tests.support.builders import make_trace
from tests.support.deep_targets import TAPS, VOCABULARY, save_target
from tests.support.heads import write_head
from tests.support.tiny_drafts import write_over
from trainer.batch import NUM_LIKELIEST, collate_outputs
from trainer.draft import load_draft
from trainer.eagle3.features import TargetFeatures
from trainer.eagle3.head import HeadModel
from trainer.sampling.teacher import Teacher

NUM_DEPTHS = 4
FORMS: list[dict[str, Any]] = [
    {},
    {"form": "speculators"},
    {"draft_vocab_size": 40},
    {"norm_before_residual": True, "norm_output": True},
    {"norm_before_fc": True, "attention_bias": True},
    {"fc_norm": True, "head_dim": 8, "num_attention_heads": 4},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def teacher(target: Path) -> Teacher:
    return Teacher(target, top_k=8)


def load(directory: Path, teacher: Teacher, num_depths: int = NUM_DEPTHS) -> HeadModel:
    model = load_draft(directory, TargetFeatures(teacher, num_depths))
    assert isinstance(model, HeadModel)
    return model


def traces(num: int = 3) -> list[Trace]:
    return [
        make_trace(index=i, vocab_size=VOCABULARY, num_prompt=3 + i, num_output=6 + 2 * i)
        for i in range(num)
    ]


def tokens_of(trace: Trace) -> Tensor:
    return torch.from_numpy(np.concatenate([trace.prompt_ids, trace.output_ids])).long()


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_loaded_head_does_not_depend_on_its_files(
    tmp_path: Path, target: Path, teacher: Teacher, form: dict[str, Any]
) -> None:
    head = write_head(tmp_path / "head", target, **form)
    copy = shutil.copytree(head, tmp_path / "copy")
    model = load(copy, teacher)
    write_over(copy)
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved", model.hf.state_dict())
    now, before = (load_file(d / "model.safetensors") for d in (tmp_path / "saved", head))
    for name, tensor in before.items():
        assert torch.equal(now[eagle3.canonical(name)].float(), tensor.float())


class Reference:
    """A head that drafts as the engine does: first one pass over the text with the target's
    features, then token by token with its own states. Written from the paper's formulas over the
    stored tensors; it shares no code with the trainer."""

    def __init__(self, directory: Path, teacher: Teacher) -> None:
        stored = load_file(directory / "model.safetensors")
        self.w = {name.replace("midlayer.", "layers.0."): t for name, t in stored.items()}
        self.spec = eagle3.read_spec(directory)
        self.target = teacher.model.hf
        self.states: dict[int, Any] = {}
        self.embedding = self.target.get_input_embeddings().weight

    @torch.no_grad()
    def logits(self, tokens: Tensor, begin: int, depth: int) -> Tensor:
        """[D] at `depth` of the draft that begins with the features of token `begin`; the drafted
        tokens are those of the text."""
        if id(tokens) not in self.states:
            self.states[id(tokens)] = self.target(tokens[None], output_hidden_states=True)
        states = self.states[id(tokens)].hidden_states
        taps = [states[tap][0, : begin + 1] for tap in self.spec.taps]
        hidden = self._combined(taps)
        for own in range(depth + 1):
            inputs = self.embedding[tokens[1 : begin + 2 + own]]
            normed, fed_back = self._layer(inputs, hidden)
            hidden = torch.cat([hidden, fed_back[-1:]])
        return self.w["lm_head.weight"] @ normed[-1]

    def _combined(self, taps: list[Tensor]) -> Tensor:
        if self.spec.has_fc_norm:
            taps = [self._norm(t, f"fc_norm.{i}") for i, t in enumerate(taps)]
        joined = torch.cat(taps, -1)
        if self.spec.norm_before_fc:
            joined = self._norm(joined, "input_norm")
        return joined @ self.w["fc.weight"].T

    def _layer(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Ordinary causal attention over the whole sequence."""
        p = "layers.0."
        normed = self._norm(hidden, p + "hidden_norm")
        residual = normed if self.spec.norm_before_residual else hidden
        inputs = torch.cat([self._norm(embedded, p + "input_layernorm"), normed], -1)
        residual = residual + self._attention(inputs)
        middle = self._norm(residual, p + "post_attention_layernorm")
        gate, up = (middle @ self.w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        before = residual + (F.silu(gate) * up) @ self.w[f"{p}mlp.down_proj.weight"].T
        normed = self._norm(before, "norm")
        return normed, normed if self.spec.norm_output else before

    def _attention(self, inputs: Tensor) -> Tensor:
        layer, num = self.spec.layer, len(inputs)
        heads, groups = layer["num_attention_heads"], layer["num_key_value_heads"]
        size = layer.get("head_dim") or self.spec.hidden_size // heads
        p = "layers.0.self_attn."

        def projected(name: str, num_heads: int) -> Tensor:
            bias = self.w.get(f"{p}{name}_proj.bias", torch.zeros(()))
            out = inputs @ self.w[f"{p}{name}_proj.weight"].T + bias
            return out.view(num, num_heads, size).transpose(0, 1)

        q, k, v = projected("q", heads), projected("k", groups), projected("v", groups)
        rate = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(num)[:, None] * torch.cat([rate, rate])

        def rotated(x: Tensor) -> Tensor:
            half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
            return x * angle.cos() + half * angle.sin()

        k, v = (x.repeat_interleave(heads // groups, 0) for x in (rotated(k), v))
        scores = rotated(q) @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(num, -1)
        return out @ self.w[p + "o_proj.weight"].T + self.w.get(p + "o_proj.bias", 0)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = self.spec.layer["rms_norm_eps"]
        return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * self.w[name + ".weight"]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_depth_gives_the_logits_of_a_head_that_drafts_token_by_token(
    target: Path, teacher: Teacher, tmp_path: Path, form: dict[str, Any]
) -> None:
    directory = write_head(tmp_path, target, **({"taps": TAPS} | form))
    model, reference = load(directory, teacher), Reference(directory, teacher)
    some = traces()
    batch = model.prepared(collate_outputs(some, 256, model.vocab_size))
    with torch.no_grad():
        logits, proposals = model(*model.inputs(batch)), model.proposals(batch)
    first = reference.w.get("d2t", torch.zeros(1))[0]  # of the draft's ids, in the target's
    num_compared, texts = 0, [tokens_of(trace) for trace in some]
    for n in range(batch.num_rows):
        tokens = texts[int(batch.trace_N[n])]
        row = int(batch.position_ids_BS[batch.row_b_N[n], batch.row_s_N[n]])
        for depth in range(NUM_DEPTHS):
            if row - 1 - depth < 0:
                assert proposals.ids_GN[depth, n] == -1
                assert depth or (proposals.likeliest_KN[:, n] == -1).all()
                continue
            expected_D = reference.logits(tokens, row - 1 - depth, depth)
            torch.testing.assert_close(logits[depth][n], expected_D, atol=2e-4, rtol=1e-3)
            assert proposals.ids_GN[depth, n] == expected_D.argmax() + first
            if not depth:
                ranked = expected_D.argsort(descending=True)[:NUM_LIKELIEST] + first
                assert proposals.likeliest_KN[:, n].tolist() == ranked.tolist()
            num_compared += 1
    assert num_compared > 60
    assert len(set(batch.row_b_N.tolist())) < len(some), "some texts share a line"


def test_a_head_of_few_tokens_has_no_more_likeliest(
    target: Path, teacher: Teacher, tmp_path: Path
) -> None:
    model = load(write_head(tmp_path, target, taps=TAPS, draft_vocab_size=3), teacher)
    batch = model.prepared(collate_outputs(traces(1), 256, model.vocab_size))
    with torch.no_grad():
        likeliest_KN = model.proposals(batch).likeliest_KN
    assert likeliest_KN.sort(0).values[:, -1].tolist() == [-1, -1, 2, 3, 4]
