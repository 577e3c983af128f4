"""The models of an evaluation: found, told apart, and fitted to each other."""

from __future__ import annotations

import shutil
from pathlib import Path

from osd.config.schema import Config
from osd.config.serving import argument
from osd.errors import ConfigError
from osd.evaluate.plan import Models
from osd.models.compatibility import check_target, read_config, vocab_size
from osd.models.fit import check_fit, is_head
from osd.models.resolve import check_name, resolve
from osd.models.vocab_padding import write_fitting

HEAD = "--head"


def possible(draft: str, head: str) -> Models:
    """What the models may prove to be once they are found: a draft may be a head."""
    return Models(
        target=Path(),
        draft=Path(draft) if draft else None,
        head=Path(head or draft) if head or draft else None,
    )


def find(config: Config, head: str) -> Models:
    """The target, and the drafts that are given; built or fetched first where that is needed.
    `head`: an EAGLE-3 head; "" = none. Raises `ConfigError` where they do not fit."""
    serving = config.serving
    check_name(serving.target, "serving.target")
    for name, key in ((serving.draft, "serving.draft"), (head, HEAD)):
        if name:
            check_name(name, key)  # before the target is fetched
    target = resolve(serving.target, "serving.target")
    check_target(target)
    draft = resolve(serving.draft, "serving.draft") if serving.draft else None
    own_head = resolve(head, HEAD) if head else None
    if own_head is not None and not is_head(own_head):
        raise ConfigError(f"{HEAD}: {head} is no EAGLE-3 head; give a draft model by --draft")
    if own_head is not None and draft is not None and is_head(draft):
        raise ConfigError(
            f"--draft: {serving.draft} is an EAGLE-3 head, as {HEAD} is; give one head alone"
        )
    given = argument(serving.vllm, "max_model_len")
    context = given if isinstance(given, int) else None
    if draft is not None:
        check_fit(target, draft, context)
    if own_head is not None:
        _check_head(target, own_head, context)
    if draft is not None and is_head(draft):
        draft, own_head = None, draft
    return Models(target=target, draft=draft, head=own_head)


def _check_head(target: Path, head: Path, max_model_len: int | None) -> None:
    """Raise `ConfigError`, by the option's name, unless the head fits."""
    try:
        check_fit(target, head, max_model_len)
    except ConfigError as error:
        raise ConfigError(str(error).replace("serving.draft=", f"{HEAD}=", 1)) from None


def fitted(draft: Path, target: Path, aside: Path) -> Path:
    """The draft model with as many rows as its target; itself where it has them, else a copy."""
    num = vocab_size(read_config(target), target)
    if vocab_size(read_config(draft), draft) == num:
        return draft
    if not aside.is_dir():
        building = aside.with_name(f"{aside.name}.new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        write_fitting(draft, building, num)
        building.rename(aside)
    return aside
