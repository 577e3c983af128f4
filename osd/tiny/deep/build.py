"""`python -m osd.tiny.deep.build DIRECTORY`: trains the deep tiny target into DIRECTORY; with
`--draft-of TARGET`, its draft."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from osd.common.progress import stages
from osd.tiny import recipe as pair
from osd.tiny.deep import recipe
from osd.tiny.quiet import quiet_transformers
from osd.tiny.tokenizer import train_tokenizer
from osd.tiny.traffic import DOMAINS, requests

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from osd.tiny.training import Batch, Report

NUM_STEPS = recipe.SHALLOW_STEPS + recipe.TARGET_STEPS
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_target(directory: Path, progress: bool) -> None:
    """Train tokenizer and target, and save them."""
    with stages(progress) as begin:
        begin("deep tiny target: loading torch")
        import torch  # noqa: F401

        begin("deep tiny target: tokenizer")
        tokenizer = train_tokenizer(_texts(), pair.VOCAB_SIZE)
        advance = begin("deep tiny target: training", NUM_STEPS, "steps")
        target = train_target(tokenizer, advance)
    with quiet_transformers():
        target.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def build_draft(directory: Path, target: Path, progress: bool) -> None:
    """Train the draft of the target in `target`, and save it with its tokenizer."""
    with stages(progress) as begin:
        begin("deep tiny draft: loading torch")
        from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

        from osd.tiny.training import train_draft

        with quiet_transformers():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
            teacher = LlamaForCausalLM.from_pretrained(target).eval()
        advance = begin("deep tiny draft: training", pair.DRAFT_STEPS, "steps")
        draft = train_draft(tokenizer, teacher, advance)
    with quiet_transformers():
        draft.save_pretrained(directory)
    for name in TOKENIZER_FILES:  # saved again, it would differ in what is said of its origin
        shutil.copyfile(target / name, directory / name)


def train_target(tokenizer: PreTrainedTokenizerFast, report: Report) -> LlamaForCausalLM:
    """The deep target, trained on all domains: at half its depth, then with every layer doubled."""
    from osd.tiny.training import batches, examples, make_model

    pools = {domain: examples(tokenizer, domain, pair.TRAIN_SEED) for domain in recipe.TARGET_MIX}
    mixed = (next(pools[domain]) for domain in cycle(recipe.TARGET_MIX))
    data = batches(mixed, recipe.TARGET_BATCH, Random(0))
    shape = replace(recipe.TARGET, num_layers=recipe.TARGET.num_layers // 2)
    shallow = make_model(shape, tokenizer, seed=1)
    _train(shallow, data, recipe.SHALLOW_STEPS, recipe.SHALLOW_LEARNING_RATE, report)
    target = make_model(recipe.TARGET, tokenizer, seed=1)
    _double(shallow, target)
    _train(target, data, recipe.TARGET_STEPS, recipe.TARGET_LEARNING_RATE, report)
    return target


def _double(shallow: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give the target each layer of the shallow one, and behind it a copy that writes nothing yet
    (block expansion, Wu et al. 2024, arXiv 2401.02415): at first both compute the same."""
    from torch.nn.init import zeros_

    target.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    target.model.norm.load_state_dict(shallow.model.norm.state_dict())
    for index, layer in enumerate(target.model.layers):
        layer.load_state_dict(shallow.model.layers[index // 2].state_dict())
        if index % 2:
            zeros_(layer.self_attn.o_proj.weight)
            zeros_(layer.mlp.down_proj.weight)


def _train(
    model: LlamaForCausalLM,
    data: Iterator[Batch],
    steps: int,
    learning_rate: float,
    report: Report,
) -> None:
    from torch.nn.functional import cross_entropy

    from osd.tiny.training import answer_logits, train

    shares = _decay_shares(steps, learning_rate)

    def loss_of(batch: Batch) -> Tensor:
        _shrink(model, next(shares))
        return cross_entropy(answer_logits(model, batch), batch.labels)

    train(model, data, loss_of, steps, learning_rate, report)


def _decay_shares(steps: int, learning_rate: float) -> Iterator[float]:
    """What each step takes off the matrices: in proportion to the learning rate, which falls
    linearly to zero."""
    for step in range(steps):
        yield recipe.TARGET_WEIGHT_DECAY * learning_rate * (1 - step / steps)


def _shrink(model: LlamaForCausalLM, share: float) -> None:
    """Weight decay of the matrices of all layers, beside the optimizer's step."""
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(1 - share)


def _texts() -> Iterator[str]:
    """The texts of the tiny pair's tokenizer, so that both have the same."""
    for domain in DOMAINS:
        for request in requests(domain, pair.NUM_TOKENIZER_REQUESTS, pair.TRAIN_SEED):
            yield request.prompt
            yield request.answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m osd.tiny.deep.build", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--draft-of", type=Path, metavar="TARGET", help="train its draft instead")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    arguments = parser.parse_args()
    progress = not arguments.quiet
    if arguments.draft_of:
        build_draft(arguments.directory, arguments.draft_of, progress)
    else:
        build_target(arguments.directory, progress)


if __name__ == "__main__":
    main()
