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
MAX_FED = 64
"""Steps whose tokens are kept apart before the table is brought up to date."""


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
        self._fed: list[torch.Tensor] = []
        """what was fed since the table was brought up to date"""
        self._num_fed = 0
        self._places: dict[int, int] = {}
        """place in the table -> which token of those it is to hold"""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._rows

    def begin(self, req_id: str, first: int) -> None:
        """From position `first` on, tokens of this request are kept here."""
        self._bring_up_to_date()  # the row may have been another's
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
        at = ends.tolist()
        spans = [
            (*self._rows[req_id], start, at[b], at[b + 1])
            for b, (req_id, start) in enumerate(zip(req_ids, starts_B.tolist(), strict=True))
        ]
        needed = max(start + end - begin - first for _, first, start, begin, end in spans)
        if needed > self._table.shape[1]:
            self._grow(len(self._table), max(needed, min(2 * needed, self._max_length)))
        width = self._table.shape[1]
        for row, first, start, begin, end in spans:
            for i in range(max(0, first - start), end - begin):
                self._places[row * width + start + i - first] = self._num_fed + begin + i
        self._fed.append(fed[: at[-1]].clone())
        self._num_fed += at[-1]
        if len(self._fed) >= MAX_FED:
            self._bring_up_to_date()

    def read(
        self, req_ids: Sequence[str], positions_T: np.ndarray, known_T: np.ndarray
    ) -> torch.Tensor:
        """[T] tokens on the device: those kept here, else the host's (`known_T`).

        Args:
            req_ids: Whose each position is.
        """
        self._bring_up_to_date()
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

    def _bring_up_to_date(self) -> None:
        """One copy for many steps: each operation on the device costs the host time."""
        if not self._fed:
            return
        places = np.array([list(self._places), list(self._places.values())], np.int64)
        place_T, token_T = to_device(places, self._table.device)
        written_T = torch.cat(self._fed).index_select(0, token_T).to(torch.int32)
        self._table.view(-1).index_copy_(0, place_T, written_T)
        self._fed.clear()
        self._places.clear()
        self._num_fed = 0

    def _grow(self, num_rows: int, num_columns: int) -> None:
        self._bring_up_to_date()
        grown = self._table.new_zeros(num_rows, num_columns)
        grown[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = grown
