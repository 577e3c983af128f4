"""The kernels, compiled by numba where it can be imported.

A function of `kernels.py` or `step.py` calls others by name. Its compiled copy finds their compiled
copies under the same names, so that one text serves both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from multiprocessing import parent_process
from types import FunctionType
from typing import Any, NamedTuple

from serving.speculation.memory import kernels, step

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """What the memory calls."""

    propose: Callable[..., int]
    propose_all: Callable[..., None]
    advance: Callable[..., int]
    remember: Callable[..., int]
    forget: Callable[..., None]


PLAIN = Kernels(kernels.propose, step.propose_all, step.advance, kernels.remember, kernels.forget)


def best(is_alone: bool = False) -> Kernels:
    """Compiled, where numba can be imported and nothing speaks against it.

    Once numba is imported, vLLM's worker for CPUs cannot start in the same process (it reads the
    attributes of all that is imported, numba's among them). So it is imported where an engine has
    started by then and no other will: in vLLM's own process of an engine, or where this is
    promised.
    """
    if not is_alone and parent_process() is None:
        return PLAIN
    try:
        return compiled()
    except ImportError as error:
        logger.warning("the memory is slower without numba (%s)", error)
        return PLAIN


def compiled() -> Kernels:
    """Compiled when they are first called, or read from numba's cache. Raises `ImportError`
    without numba."""
    import numba

    scope: dict[str, Any] = vars(kernels) | vars(step)
    functions = {
        name: each
        for name, each in scope.items()
        if isinstance(each, FunctionType) and each.__module__ in (kernels.__name__, step.__name__)
    }
    for name, plain in functions.items():
        copy = FunctionType(plain.__code__, scope, name, plain.__defaults__)
        copy.__module__, copy.__qualname__ = plain.__module__, plain.__qualname__
        scope[name] = numba.njit(cache=True, nogil=True)(copy)
    return Kernels(*(scope[name] for name in Kernels._fields))
