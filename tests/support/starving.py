"""Memory that runs out: after so many new tensors, every further one is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryFor(TorchDispatchMode):
    """Room for `num` new tensors or packed matrices in this thread.

    Every further one raises `torch.OutOfMemoryError`, as a full memory does.

    Example:
        with MemoryFor(3):
            swapper.commit(2)
    """

    def __init__(self, num: int) -> None:
        super().__init__()
        self._num = num

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = storages([args, kwargs])
        if "onednn_mm_handler" in str(func):
            self._take()
        result = func(*args, **(kwargs or {}))
        for _ in storages(result) - before:
            self._take()
        return result

    def _take(self) -> None:
        self._num -= 1
        if self._num < 0:
            raise torch.OutOfMemoryError("pretended: out of memory")


def storages(tree: Any) -> set[int]:
    """The addresses of the values of all tensors within."""
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    } - {0}
