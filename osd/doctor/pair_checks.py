"""Checks of the configured models: whether they are found and fit each other, and what the draft
costs.

Nothing is downloaded or trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from osd.common.wording import percent, size
from osd.config.schema import Config
from osd.doctor.checks import Check
from osd.errors import ConfigError
from osd.models import built_in, resolve
from osd.models.draft_cost import draft_cost
from osd.models.eagle3 import read_spec
from osd.models.fit import check_fit, is_head
from osd.models.teacher import check_teacher, is_needed
from osd.service.plan import max_model_len


def check_models(config: Config) -> Iterator[Check]:
    """Target, draft, whether they fit, what the draft costs, and whether the trainer can load the
    target where it has to. A broken check is the last one."""
    if not config.serving.target and not config.serving.draft:
        yield Check(
            "models",
            None,
            "none given; `osd doctor --config FILE` or serving.target=DIR serving.draft=DIR",
        )
        return
    found: list[Path] = []
    for name in ("target", "draft"):
        check, path = _find(getattr(config.serving, name), name)
        yield check
        found += [path] if path else []
    if len(found) < 2:
        return
    fit, cost = _fit(config, *found), _cost(config, *found)
    yield fit
    if fit.ok:
        yield cost
    if fit.ok and is_needed(config, is_head=is_head(found[1])):
        yield _teacher(config, *found)


def _find(value: str, name: str) -> tuple[Check, Path | None]:
    try:
        path = locate(value, f"serving.{name}")
    except ConfigError as error:
        return Check(name, False, str(error)), None
    if path is None:
        how = "built" if value in built_in.NAMES else "downloaded"
        return Check(
            name, None, f"{value}: not on this machine yet, {how} when it is first served"
        ), None
    return Check(name, True, str(path)), path


def locate(name: str, key: str) -> Path | None:
    """The directory of a model on this machine; None when it has to be built or downloaded first.

    Raises `ConfigError` for a model that can never be found, as `osd.models.resolve.resolve` does.
    """
    if name in built_in.NAMES and not built_in.is_built(name, key):
        return None
    if name in built_in.NAMES or not _is_hub_name(name):
        return resolve.resolve(name, key)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{key}={name}: {error}; give a model directory or a hub name (owner/model)"
        ) from None


def _is_hub_name(name: str) -> bool:
    path = Path(name).expanduser()
    return (
        not (path.is_dir() or path.is_absolute() or name.startswith((".", "~")))
        and name.count("/") == 1
    )


def _fit(config: Config, target: Path, draft: Path) -> Check:
    try:
        num_tokens = check_fit(target, draft, max_model_len(config))
    except ConfigError as error:
        return Check("fit", False, str(error))
    what = f"the draft can propose each of the target's {num_tokens} tokens"
    if is_head(draft):
        num = read_spec(draft).draft_vocab_size
        what = f"the EAGLE-3 head can propose {num} of the target's {num_tokens} tokens"
    return Check("fit", True, what)


def _teacher(config: Config, target: Path, draft: Path) -> Check:
    try:
        head = draft if is_head(draft) else None
        return Check("teacher", True, check_teacher(config, target, head=head))
    except ConfigError as error:
        return Check("teacher", False, str(error))


def _cost(config: Config, target: Path, draft: Path) -> Check:
    try:
        cost = draft_cost(target, draft, config.serving.vllm)
    except ConfigError as error:
        return Check("draft's cost", False, str(error))
    return Check(
        "draft's cost",
        None,
        f"{size(cost.weights)} of weights; {cost.draft_kv} bytes of keys and values per token "
        f"beside the target's {cost.target_kv}: the draft's KV cache takes "
        f"{percent(cost.draft_kv, cost.draft_kv + cost.target_kv)} of every block",
    )
