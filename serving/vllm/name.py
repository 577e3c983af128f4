"""A private name of vLLM, and what is relied on."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A name of vLLM, and what is relied on.

    Example:
        Name("vllm.v1.engine.core:EngineCore.post_step", takes=("self", "model_executed"))
    """

    path: str
    """`module:attribute`"""
    takes: tuple[str, ...] = ()
    """Parameters of this function."""
    has: tuple[str, ...] = ()
    """Fields of this class."""
    says: tuple[str, ...] = ()
    """Text that stands in its source."""


def resolve(path: str) -> Any:
    """The object with this name. Raises `AttributeError` or `ImportError` when it is gone."""
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
