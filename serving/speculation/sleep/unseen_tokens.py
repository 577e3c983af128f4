"""Tokens that requests produced while the draft slept, kept on the device.

Under asynchronous scheduling the V1 runner's host copy holds −1 for them. Each step feeds them to
the target: what is fed while the draft sleeps is what it has to read later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from serving.vllm.hooks import to_device

FIRST_ROWS, FIRST_COLUMNS = 16, 256


class UnseenTokens:
    """One row for each request that sleeps, one column for each position from its first unknown one
    on. Both grow as needed, columns to as many as a request may have tokens, by copies on the
    device for which the host does not wait."""

    def __init__(self, max_length: int, device: torch.device) -> None:
        self._max_length = max_length
        num_rows, num_columns = FIRST_ROWS, min(FIRST_COLUMNS, max_length)
        self._table = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self._rows: dict[str, tuple[int, int]] = {}
        """request -> its row, and the position of column 0"""
        self._free = list(range(num_rows))

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._rows

    def begin(self, req_id: str, first: int) -> None:
        """From position `first` on, tokens of this request are kept here."""
        if not self._free:
            num_rows = len(self._table)
            self._grow(2 * num_rows, self._table.shape[1])
            self._free = list(range(num_rows, 2 * num_rows))
        self._rows[req_id] = (self._free.pop(), first)

    def end(self, req_ids: Iterable[str]) -> None:
        """What is kept of these requests is no longer needed."""
        for req_id in req_ids if self._rows else ():
            if (place := self._rows.pop(req_id, None)) is not None:
                self._free.append(place[0])

    def end_all_but(self, req_ids: set[str]) -> None:
        self.end(self._rows.keys() - req_ids)

    def write(
        self, req_ids: Sequence[str], starts_B: np.ndarray, ends: np.ndarray, fed: torch.Tensor
    ) -> None:
        """`fed`: [T] tokens fed in this step, on the device. Request b's are fed[ends[b]:ends[b+1]]
        and stand at its positions from starts_B[b] on."""
        rows, columns, taken = [], [], []
        for b, req_id in enumerate(req_ids):
            row, first = self._rows[req_id]
            for i in range(max(0, first - int(starts_B[b])), int(ends[b + 1] - ends[b])):
                rows.append(row)
                columns.append(int(starts_B[b]) + i - first)
                taken.append(int(ends[b]) + i)
        if not rows:
            return
        if (needed := max(columns) + 1) > self._table.shape[1]:
            self._grow(len(self._table), max(needed, min(2 * needed, self._max_length)))
        device = self._table.device
        index = to_device(np.array([rows, columns, taken]), device)
        self._table[index[0], index[1]] = fed[index[2]].to(torch.int32)

    def read(
        self, req_ids: Sequence[str], positions_T: np.ndarray, known_T: np.ndarray
    ) -> torch.Tensor:
        """[T] tokens on the device: those kept here, else the host's (`known_T`).

        Args:
            req_ids: Whose each position is.
        """
        nowhere = (-1, np.iinfo(np.int64).max)
        places = np.array([self._rows.get(req_id, nowhere) for req_id in req_ids])
        is_here_T = positions_T >= places[:, 1]
        columns_T = np.where(is_here_T, positions_T - places[:, 1], 0)
        columns_T = np.minimum(columns_T, self._table.shape[1] - 1)
        rows_T = np.where(is_here_T, places[:, 0], 0)
        device = self._table.device
        index = to_device(np.stack([rows_T, columns_T, is_here_T, known_T]), device)
        here_T = self._table[index[0], index[1]].long()
        return torch.where(index[2].bool(), here_T, index[3])

    def _grow(self, num_rows: int, num_columns: int) -> None:
        grown = self._table.new_zeros(num_rows, num_columns)
        grown[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = grown
