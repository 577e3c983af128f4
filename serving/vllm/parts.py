"""Parts of the project that need names of vLLM: is all there, and what becomes of a part where
something is not.

A part is off when one of its names is gone or changed, or when it fails to start. The engine serves
all the same; the reason goes to the log, and with the heartbeat to `osd status`. `osd doctor` finds
it without an engine, from vLLM's source.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from osd.errors import OSDError
from serving.vllm.name import Name, resolve
from serving.vllm.names import NAMES, Part

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNDRAFTED = (
    "requests with logit_bias, min_p or logprob_token_ids are refused; min_tokens and thinking "
    "budgets are what vLLM makes of them beside a draft"
)
CONSEQUENCES: dict[Part, str] = {
    "server": "vLLM's own server cannot be started",
    "capture": "nothing is captured, so nothing is learnt from this engine",
    "capture_v2": "nothing is captured, so nothing is learnt from this engine",
    "swap": "a new draft serves after a restart only",
    "control": "k stays at speculation.k_max, with drafts of the draft model alone",
    "sleep": "the draft runs at k = 0 too",
    "sleep_v2": "the draft runs at k = 0 too, and makes k_max passes in each step",
    "memory": "the memory proposes nothing under asynchronous scheduling",
    "memory_v2": "the memory proposes nothing",
    "memory_ranks": "the memory proposes nothing over several ranks, where they alone could ask it",
    "sampled": "the memory proposes nothing beside sampled drafts",
    "sampled_v2": "the memory proposes nothing beside sampled drafts",
    "heads": "EAGLE-3 heads are not served; draft models are",
    "split": "the time of a step is not known by part",
    "repairs": "on a CPU nothing is speculated, since outputs at temperature > 0 would be wrong",
    "requests": (
        "requests with logit_bias or min_p are refused; where undrafted is off too, one with "
        "logprob_token_ids may end the engine"
    ),
    "undrafted": _UNDRAFTED,
    "undrafted_v2": _UNDRAFTED,
}


class Definition(Protocol):
    """How a name of vLLM is defined."""

    def parameters(self) -> Sequence[str]: ...
    def fields(self) -> set[str]: ...
    def source(self) -> str: ...


Look = Callable[[str], Definition]
"""Definition of a name. Raises `LookupError`, `AttributeError` or `ImportError` when it is gone."""


def problem_with(part: Part, look: Look | None = None) -> str:
    """What is wrong with the first name of a part that is not as expected; "" when all are."""
    return missing(NAMES[part], look)


def missing(names: Sequence[Name], look: Look | None = None) -> str:
    """As `problem_with`, for any names. `look` finds them; by default they are imported."""
    try:
        for name in names:
            if problem := _problem(name, (look or Imported)(name.path)):
                return problem
    except LookupError as error:
        return str(error.args[0])
    except Exception as error:  # noqa: BLE001  an import may fail in any way
        return f"{type(error).__name__}: {error}"
    return ""


def start(
    off: dict[str, str], part: Part, act: Callable[[], T], check: Part | None = None
) -> T | None:
    """What `act` returns; None where a name of the part (or of `check`) is wrong, or `act` fails.
    The reason is then logged and kept in `off`. Our own errors are for the user, and are raised."""
    try:
        problem = problem_with(check or part)
        if not problem:
            return act()
    except OSDError:
        raise
    except Exception as error:
        logger.exception("%s did not start", part)
        problem = f"{type(error).__name__}: {error}"
    switch_off(off, part, problem, check or part)
    return None


def switch_off(
    off: dict[str, str], part: Part, problem: str, runner_part: Part | None = None
) -> None:
    """Note and log that a part is off. `runner_part`: its name on this model runner."""
    off[part] = reason(runner_part or part, problem)
    logger.warning("%s is off, serving is not affected: %s", part, off[part])


def reason(part: Part, problem: str) -> str:
    """The problem with what it means."""
    return f"{problem}; {CONSEQUENCES[part]}"


class Imported:
    """The definition of a name in the vLLM that this process runs."""

    def __init__(self, path: str) -> None:
        module, _, attribute = path.partition(":")
        owner, _, last = attribute.rpartition(".")
        if owner and last not in vars(resolve(f"{module}:{owner}")):
            raise LookupError(f"there is no {path} any more")
        self._found = resolve(path)

    def parameters(self) -> Sequence[str]:
        return tuple(inspect.signature(self._found).parameters)

    def fields(self) -> set[str]:
        return {name for each in self._found.__mro__ for name in inspect.get_annotations(each)}

    def source(self) -> str:
        return inspect.getsource(self._found)


def _problem(name: Name, found: Definition) -> str:
    if name.takes:
        parameters = found.parameters()
        if any(parameter not in parameters for parameter in name.takes):
            return f"{name.path} no longer takes ({', '.join(name.takes)})"
    if name.has:
        fields = found.fields()
        for field in name.has:
            if field not in fields:
                return f"{name.path} no longer has {field}"
    if name.says:
        source = found.source()
        for text in name.says:
            if text not in source:
                return f"the source of {name.path} no longer says `{text}`"
    return ""
