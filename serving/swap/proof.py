"""Proof that a swap took effect: the weights the live draft computes with are compared, bit by bit,
with the release.

    release ──► chosen columns, rows, vectors ──► digest ─┐
    engine  ──► read back through its layers  ──► digest ─┴► equal?

An engine fuses matrices, pads vocabularies and packs weights for its kernels. A file and a live
model can therefore not be compared name by name, and a stale packed copy does not show in the
parameters. The weights are read back through the kernels that serve: a linear layer answers a unit
vector with exactly one column of its matrix. The digest is a sum over bits, so it does not depend
on how matrices are stacked or padded. It would not notice two whole layers exchanged.

Whether an engine can be read back is tried at its start, with the draft it loaded itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

logger = logging.getLogger(__name__)

NUM_COLUMNS = 4
"""Columns compared of every matrix. Each costs a token's pass through the layer; a matrix that was
not loaded differs in all of them."""
NUM_ROWS = 64
"""Rows compared of every embedding."""
EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
HEADS = ("lm_head", "embed_out")
NOT_LOADED = ("rotary_emb.inv_freq", "masked_bias")
"""Entries of older checkpoints that engines do not load but compute."""
TINY = 1e-30
"""Smaller values count as 0, since kernels may flush them."""
VALUES_AT_ONCE = 1_000_000
"""Values that are summed together: many, to save time, and not all, to save memory."""
_MIX = -0x61C8864680B583EB
"""The golden ratio as a signed 64-bit number."""
_MODULUS = 1 << 64

Tensors = Mapping[str, torch.Tensor]


def columns(num_features: int) -> torch.Tensor:
    """int64 [<= NUM_COLUMNS]: the input features of a matrix that are compared."""
    return _chosen(num_features, NUM_COLUMNS)


def rows(num_embeddings: int) -> torch.Tensor:
    """int64 [<= NUM_ROWS]: the entries of an embedding that are compared."""
    return _chosen(num_embeddings, NUM_ROWS)


def digest(parts: Iterable[torch.Tensor]) -> int:
    """A 64-bit number that depends on the bits of all values, but not on their order or on zeros
    among them."""
    waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    total = 0
    for part in parts:
        alike = waiting.setdefault((part.dtype, part.device), [])
        alike.append(part.reshape(-1))
        if sum(map(len, alike)) >= VALUES_AT_ONCE:
            total += _sum_of_bits(alike)
            alike.clear()
    return (total + sum(_sum_of_bits(alike) for alike in waiting.values() if alike)) % _MODULUS


def of_release(tensors: Tensors, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The parts of a checkpoint that are compared, in the dtype that serves."""
    has_head = any(_is(name, HEADS) for name in tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or name.endswith(NOT_LOADED):
            continue
        if tensor.dim() == 1:
            yield tensor.to(dtype)
        elif _is(name, EMBEDDINGS):
            yield tensor[rows(tensor.shape[0])].to(dtype)
            if not has_head:
                yield tensor[:, columns(tensor.shape[1])].to(dtype)
        elif tensor.dim() == 2:
            yield tensor[:, columns(tensor.shape[1])].to(dtype)


class SwapProof:
    """Compares releases with one live draft. `read_back` yields from the engine what `of_release`
    yields from a release; `untouched` yields parts of the target, which no swap may change."""

    def __init__(
        self,
        read_back: Callable[[], Iterable[torch.Tensor]],
        dtype: torch.dtype,
        first: Tensors,
        untouched: Callable[[], Iterable[torch.Tensor]] = lambda: (),
    ) -> None:
        self._read_back, self._dtype, self._untouched = read_back, dtype, untouched
        self._before: int
        self.why_not = self._try(first)
        """Why swaps cannot be proved in this engine; "" when they can."""
        if self.why_not:
            logger.warning("swaps are not proved in this engine: %s", self.why_not)

    def expected(self, tensors: Tensors) -> int:
        """The checksum of a draft that holds this checkpoint. It does not touch the engine."""
        return digest(of_release(tensors, self._dtype))

    def problem(self, expected: int) -> str:
        """How the live draft differs from the checkpoint with this checksum; "" when it does not,
        or when swaps cannot be proved here."""
        if self.why_not:
            return ""
        if digest(self._untouched()) != self._before:
            return "the target's weights are no longer those of the start: restart this replica"
        live = digest(self._read_back())
        return (
            ""
            if live == expected
            else f"the engine holds other weights: checksum {live:016x}, not {expected:016x}"
        )

    def _try(self, first: Tensors) -> str:
        try:
            self._before = digest(self._untouched())
            live, expected = digest(self._read_back()), self.expected(first)
        except Exception as error:  # noqa: BLE001  an engine with other layers serves all the same
            return f"{type(error).__name__}: {error}"
        return "" if live == expected else "its layers hold the first draft in a form of their own"


def _sum_of_bits(alike: list[torch.Tensor]) -> int:
    values = torch.cat(alike)
    values = torch.where(values.float().abs() < TINY, torch.zeros_like(values), values)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]).to(
        torch.int64
    )
    return int((bits * (bits * 2 + _MIX)).sum())


def _chosen(num: int, most: int) -> torch.Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(num))[:most]


def _is(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name.split(".") for part in parts)
