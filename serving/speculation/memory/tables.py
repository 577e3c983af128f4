"""Empty tables, as the kernels read them."""

from __future__ import annotations

import numpy as np

from serving.speculation.memory.kernels import NUM_NEXT, WAYS, Table

CACHE_LINE = 64
"""Bytes."""


def table_of(num: int) -> Table:
    """An empty table of about so many entries."""
    num = max(num // WAYS, 1) * WAYS
    return Table(
        _lines(num, np.int64, -1),
        _lines(num, np.int64, -1),
        _lines(num * NUM_NEXT, np.int32, 0).reshape(num, NUM_NEXT),
        _lines(num * NUM_NEXT, np.uint16, 0).reshape(num, NUM_NEXT),
    )


def _lines(num: int, dtype: type[np.generic], value: int) -> np.ndarray:
    """An array that begins where a line of the cache does, so that a bucket lies in as few as it
    can."""
    num_bytes = num * np.dtype(dtype).itemsize
    raw_N = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -raw_N.ctypes.data % CACHE_LINE
    found_N = raw_N[start : start + num_bytes].view(dtype)
    found_N[:] = value
    return found_N
