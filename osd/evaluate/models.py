"""The models of an evaluation: found, told apart, and fitted to each other."""

from __future__ import annotations

import shutil
from pathlib import Path

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.evaluate.plan import Models
from osd.models.compatibility import check_target, read_config, vocab_size
from osd.models.fit import check_fit, is_head
from osd.models.resolve import resolve
from osd.models.vocab_padding import write_fitting


def find(config: Config, head: str) -> Models:
    """The target, and the drafts that are given; built or fetched first where that is needed.
    `head`: an EAGLE-3 head; "" = none. Raises `ConfigError` where they do not fit."""
    serving = config.serving
    target = resolve(serving.target, "serving.target")
    check_target(target)
    draft = resolve(serving.draft, "serving.draft") if serving.draft else None
    own_head = resolve(head, "serving.draft") if head else None
    if own_head is not None and not is_head(own_head):
        raise ConfigError(f"--head: {head} is no EAGLE-3 head; give a draft model by --draft")
    if draft is not None and is_head(draft):
        if own_head is not None:
            raise ConfigError(
                f"--draft: {serving.draft} is an EAGLE-3 head, as --head is; give one head alone"
            )
        draft, own_head = None, draft
    for one in filter(None, (draft, own_head)):
        check_fit(target, one, serving.vllm.get("max_model_len"))
    return Models(target=target, draft=draft, head=own_head)


def fitted(draft: Path, target: Path, aside: Path) -> Path:
    """The draft model with as many rows as its target; itself where it has them, else a copy."""
    num = vocab_size(read_config(target), target)
    if vocab_size(read_config(draft), draft) == num:
        return draft
    if not aside.is_dir():
        building = aside.with_name(f"{aside.name}.new")
        shutil.rmtree(building, ignore_errors=True)
        write_fitting(draft, building, num)
        building.rename(aside)
    return aside
