"""EAGLE-3 heads in vLLM: by which method it drafts with one, and which of the target's layers it
reads for it.

    config.json of the head ──► taps ──► target.aux_hidden_state_layers ──► fc of the head

vLLM takes the taps from one of several keys, others with each model runner, leaves out those named
twice, and goes by its own defaults where it finds none: a head would then draft from hidden states
it was not trained on, and only its acceptance would show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from osd.errors import ConfigError, SwapError
from osd.models import eagle3
from osd.models.compatibility import read_config
from serving.vllm import parts

MODEL_METHOD, HEAD_METHOD = "draft_model", "eagle3"
SERVED_METHODS = (MODEL_METHOD, HEAD_METHOD)
"""vLLM's methods for a draft model of its own and for an EAGLE-3 head. All others are other heads,
or need no weights."""


def method_for(draft: Path) -> str:
    """vLLM's speculative method for the draft in a directory."""
    return HEAD_METHOD if eagle3.is_eagle3(read_config(draft)) else MODEL_METHOD


def check_method(worker: Any) -> None:
    """Raise `SwapError` unless the draft is a model of its own or an EAGLE-3 head."""
    method = worker.vllm_config.speculative_config.method
    if method not in SERVED_METHODS:
        raise SwapError(
            f"vLLM would draft by the method {method!r}, which is not served: only a draft model "
            "of its own and an EAGLE-3 head are. Where no method is given vLLM goes by the name of "
            "the draft's directory, which must not contain eagle-, dflash or dspark then"
        )


def check_draft(worker: Any, draft: Path) -> None:
    """Raise `SwapError` where the engine does not draft as the draft in this directory needs it."""
    check_method(worker)
    method = worker.vllm_config.speculative_config.method
    try:
        wanted = method_for(draft)
        taps = eagle3.read_spec(draft).taps_in if wanted == HEAD_METHOD else None
    except ConfigError as error:
        raise SwapError(str(error)) from None
    if method != wanted:
        raise SwapError(
            f"vLLM drafts by the method {method!r} with {draft}, which needs {wanted!r}: give that "
            "as the method of --speculative-config"
        )
    if taps is None:
        return
    if problem := parts.problem_with("heads"):
        raise SwapError(parts.reason("heads", problem))
    check_taps(worker, taps(num_layers(worker)))


def num_layers(worker: Any) -> int:
    """Layers of the target, on all ranks together."""
    return int(worker.vllm_config.model_config.get_total_num_hidden_layers())


def check_taps(worker: Any, wanted: tuple[int, ...]) -> None:
    """Raise `SwapError` unless the target gives the head the layers it was trained on."""
    found = taps_read(worker.model_runner.get_model())
    if found != wanted:
        raise SwapError(
            f"vLLM gives the head the target's layers {_listed(found)}, and it was trained on "
            f"{_listed(wanted)}: its config.json must name each of them once, as "
            f"{eagle3.TAPS} at its top"
        )


def taps_read(target: Any) -> tuple[int, ...]:
    """The layers before which this model's hidden states are read, ascending; () = none are."""
    of_modules = (getattr(module, "aux_hidden_state_layers", ()) for module in target.modules())
    return tuple(next((layers for layers in of_modules if layers), ()))


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) or "none"
