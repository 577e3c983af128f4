"""One step: how far it goes, when it is skipped, and what the optimizer remembers of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from osd.records import Trace
from tests.support.tiny_drafts import chain_traces, tiny_llama
from tests.support.tiny_rounds import config
from trainer import adapter
from trainer.distiller import Distiller, accelerator
from trainer.draft import RowModel
from trainer.optimizer import moments_of

TRACES = chain_traces(2, num_output=6)
DECAY_OF_MEAN = 0.9
"""AdamW's β1: a first gradient g is remembered as (1 - β1) g."""


def distiller_with(*, scale: float = 0.3, **fields: Any) -> Distiller:
    return Distiller(RowModel(tiny_llama(scale=scale)), config(**fields))


def weights_of(distiller: Distiller) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in distiller.model.hf.state_dict().items()}


def head_of(distiller: Distiller) -> Tensor:
    return distiller.model.hf.lm_head.weight.detach().clone()


def is_changed(distiller: Distiller, before: dict[str, Tensor]) -> bool:
    return any(
        not torch.equal(value, before[name])
        for name, value in distiller.model.hf.state_dict().items()
    )


def gradient(distiller: Distiller, traces: list[Trace]) -> Tensor:
    """Of all weights together, by plain autograd."""
    batch = distiller.collate(traces)
    parameters = [
        parameter for parameter in distiller.model.parameters() if parameter.requires_grad
    ]
    loss = (distiller.losses(batch) * batch.weight_N).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def remembered(distiller: Distiller) -> Tensor:
    """The mean gradient in the optimizer's memory, of all weights together."""
    moments = moments_of(distiller.optimizer)
    order = sorted(
        (name for name in moments if name.endswith(".exp_avg")),
        key=lambda name: int(name.split(".")[0]),
    )
    return torch.cat([moments[name].flatten() for name in order])


@pytest.mark.parametrize("part", [0.01, 0.5, 2.0])
def test_a_gradient_counts_no_more_than_the_greatest_norm(part: float) -> None:
    true = gradient(distiller_with(), TRACES)
    distiller = distiller_with(max_grad_norm=part * float(true.norm()))
    assert distiller.step(distiller.collate(TRACES), 0) is not None
    torch.testing.assert_close(
        remembered(distiller), (1 - DECAY_OF_MEAN) * min(1.0, part) * true, rtol=1e-3, atol=1e-6
    )


def test_a_huge_gradient_does_not_outweigh_the_next() -> None:
    # AdamW divides by what it remembers of the gradients' size: after an unclipped one, the next
    # would move nothing.
    distiller = distiller_with(max_grad_norm=1.0, warmup_steps=0)
    hook = distiller.model.hf.lm_head.weight.register_hook(lambda gradient: 1e6 * gradient)
    distiller.step(distiller.collate(TRACES), 0)
    hook.remove()
    distiller.restart(adapter.below(tiny_llama(scale=0.3)), moments_of(distiller.optimizer))
    before = head_of(distiller)
    distiller.step(distiller.collate(TRACES), 1)
    moved = (head_of(distiller) - before).abs()
    assert float(moved.max()) > 0.3 * distiller.optimizer.param_groups[0]["lr"]


def test_each_step_has_a_gradient_of_its_own() -> None:
    distiller = distiller_with(learning_rate=1e-12, max_grad_norm=1e9)
    first, second = gradient(distiller, TRACES[:1]), gradient(distiller, TRACES[1:])
    for index in range(2):
        distiller.step(distiller.collate(TRACES[index : index + 1]), index)
    expected = (1 - DECAY_OF_MEAN) * (DECAY_OF_MEAN * first + second)
    torch.testing.assert_close(remembered(distiller), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "warmup_steps, parts", [(4, [0.25, 0.5, 0.75, 1, 1]), (1, [1, 1]), (0, [1, 1])]
)
def test_the_rate_rises_to_its_part_of_the_configured_one(
    warmup_steps: int, parts: list[float]
) -> None:
    distiller = distiller_with(learning_rate=0.01, warmup_steps=warmup_steps)
    batch, rates = distiller.collate(TRACES[:1]), []
    for index in range(len(parts)):
        before = head_of(distiller)
        # A first step moves a weight by the rate, whatever the gradient.
        distiller.restart(weights_of(distiller), {})
        distiller.step(batch, index, scale=0.5)
        rates.append(float((head_of(distiller) - before).abs().max()))
    assert rates == pytest.approx([0.005 * part for part in parts], rel=1e-3)
    distiller.restart(weights_of(distiller), {})
    before = head_of(distiller)
    distiller.step(batch, warmup_steps)
    assert float((head_of(distiller) - before).abs().max()) == pytest.approx(0.01, rel=1e-3), (
        "all of it"
    )


def test_the_loss_told_is_that_before_the_step() -> None:
    distiller = distiller_with()
    batch = distiller.collate(TRACES)
    expected = float((distiller.losses(batch) * batch.weight_N).sum())
    assert distiller.step(batch, 0) == pytest.approx(expected, rel=1e-5)


WRONG = {
    "an infinite loss": lambda hf: hf.lm_head.weight.data[0].fill_(torch.inf),
    "a loss that is no number": lambda hf: hf.lm_head.weight.data[0].fill_(torch.nan),
    "an infinite gradient": lambda hf: hf.lm_head.weight.register_hook(
        lambda gradient: gradient * torch.inf
    ),
    "a gradient that is no number": lambda hf: hf.lm_head.weight.register_hook(
        lambda gradient: gradient * torch.nan
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_step_that_is_not_finite_is_not_taken(name: str) -> None:
    distiller = distiller_with()
    WRONG[name](distiller.model.hf)
    before = {key: value.nan_to_num() for key, value in weights_of(distiller).items()}
    assert distiller.step(distiller.collate(TRACES), 0) is None
    assert {
        key: torch.equal(value.nan_to_num(), before[key])
        for key, value in weights_of(distiller).items()
    } == (dict.fromkeys(before, True))
    assert moments_of(distiller.optimizer) == {}


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", [0, -1])
def test_one_weight_that_is_no_number_is_found(value: float, where: int) -> None:
    distiller = distiller_with()
    assert distiller.is_finite()
    list(distiller.model.parameters())[where].data.view(-1)[-1] = value
    assert not distiller.is_finite()


def test_a_restart_takes_weights_and_memory_and_forgets_its_own() -> None:
    distiller, other = distiller_with(), tiny_llama(seed=1, scale=0.3)
    assert distiller.step(distiller.collate(TRACES), 0) is not None
    moments = {name: value.clone() for name, value in moments_of(distiller.optimizer).items()}
    distiller.restart(adapter.below(other), {})
    assert not is_changed(distiller, other.state_dict()) and moments_of(distiller.optimizer) == {}
    distiller.restart(adapter.below(other), moments)
    assert moments_of(distiller.optimizer).keys() == moments.keys()
    assert all(
        torch.equal(value, moments[name]) for name, value in moments_of(distiller.optimizer).items()
    )


@pytest.mark.parametrize("configured, most", [(16, 16), (1024, 256)])
def test_a_batch_is_no_longer_than_configured_nor_than_the_draft_can_see(
    configured: int, most: int
) -> None:
    distiller = distiller_with(max_length=configured)
    long = chain_traces(1, num_output=300)
    assert distiller.collate(long).ids_BS.shape == (1, most)
    mixed = [*chain_traces(1, num_output=12), *TRACES]
    assert len(distiller.collate(mixed).ids_BS) < len(mixed), "several traces share a line"


def test_an_adapted_draft_moves_by_its_adapters_alone() -> None:
    distiller = distiller_with(method="lora", weight_decay=0.1, lora_rank=3, lora_alpha=6)
    before = adapter.below(distiller.model.hf)
    before = {name: value.clone() for name, value in before.items()}
    assert distiller.step(distiller.collate(TRACES), 0) is not None
    after = adapter.below(distiller.model.hf)
    assert all(torch.equal(after[name], before[name]) for name in before)
    adapters = adapter.adapters(distiller.model.hf)
    assert {float(value) for name, value in adapters.items() if name.endswith(".scale")} == {2.0}
    assert {value.shape[0] for name, value in adapters.items() if ".lora_A." in name} == {3}


def test_decay_shrinks_what_no_gradient_moves() -> None:
    distiller = distiller_with(weight_decay=0.5, learning_rate=0.1, warmup_steps=0)
    embedding = distiller.model.hf.get_input_embeddings().weight
    unseen = sorted(
        set(range(64))
        - {int(token) for trace in TRACES for token in [*trace.prompt_ids, *trace.output_ids]}
    )
    before = embedding[unseen].clone()
    distiller.step(distiller.collate(TRACES), 0)
    torch.testing.assert_close(embedding[unseen], before * (1 - 0.1 * 0.5))


def test_precision_and_device_are_the_configured_ones() -> None:
    assert accelerator(config()).device == torch.device("cpu")
    assert accelerator(config()).mixed_precision == "no"
