"""Proof that a swap took effect: the weights the live draft computes with are compared, bit by bit,
with the release.

    release ──► chosen columns, rows, vectors ──► digest ─┐
    engine  ──► read back through its layers  ──► digest ─┴► equal?

An engine fuses matrices, pads vocabularies and packs weights for its kernels. A file and a live
model can therefore not be compared name by name, and a stale packed copy does not show in the
parameters. The weights are read back through the kernels that serve: a linear layer answers a unit
vector with exactly one column of its matrix. The digest is a sum over bits, so it does not depend
on how matrices are stacked or padded. It would not notice two whole layers exchanged.

Under tensor parallelism a rank holds rows of some matrices, columns of others, and copies of the
rest. The sum does not depend on where parts lie either: each rank digests what it holds, by holder.
Holders add up to the release; what several ranks hold as copies must be equal, and counts once.

Whether an engine can be read back is tried at its start, with the draft it loaded itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from osd.errors import SwapError
from osd.models.eagle3 import D2T

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
EVERY_RANK = "every rank"
"""Holder of what lies on every rank as a copy."""


def columns(num_features: int) -> torch.Tensor:
    """int64 [<= NUM_COLUMNS]: the input features of a matrix that are compared."""
    return _chosen(num_features, NUM_COLUMNS)


def rows(num_embeddings: int) -> torch.Tensor:
    """int64 [<= NUM_ROWS]: the entries of an embedding that are compared."""
    return _chosen(num_embeddings, NUM_ROWS)


def digest(parts: Iterable[torch.Tensor]) -> int:
    """A 64-bit number that depends on the bits of all values, but not on their order or on zeros
    among them."""
    return digests((EVERY_RANK, part) for part in parts).get(EVERY_RANK, 0)


def digests(held: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Holder -> `digest` of its parts, from pairs of a holder and a part."""
    sums: dict[str, _Sum] = {}
    for holder, part in held:
        sums.setdefault(holder, _Sum()).add(part)
    return {holder: total.digest() for holder, total in sums.items()}


def problem(ranks: Sequence[Mapping[str, int]], expected: int) -> str:
    """How the `digests` of all ranks differ from a release with this digest; "" when they do
    not."""
    whole: dict[str, int] = {}
    for held in ranks:
        for holder, found in held.items():
            if whole.setdefault(holder, found) != found:
                return f"the copies on {holder} differ"
    live = sum(whole.values()) % _MODULUS
    return (
        ""
        if live == expected
        else f"the engine holds other weights: checksum {live:016x}, not {expected:016x}"
    )


def of_release(tensors: Tensors, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The parts of a checkpoint that are compared, in the dtype that serves."""
    has_head = holds(tensors, HEADS)
    for name, tensor in tensors.items():
        if name == D2T:
            yield tensor
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


def holds(names: Iterable[str], parts: tuple[str, ...]) -> bool:
    """Whether a checkpoint with these names holds an embedding (`EMBEDDINGS`) or an output head
    (`HEADS`) of its own."""
    return any(_is(name, parts) for name in names)


class SwapProof:
    """Reads one rank's part of a live draft. `read_back` yields from the engine, with their
    holders, what `of_release` yields from a release; `untouched` yields parts of the target, which
    no swap may change."""

    def __init__(
        self,
        read_back: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        dtype: torch.dtype,
        untouched: Callable[[], Iterable[torch.Tensor]] = lambda: (),
    ) -> None:
        self._read_back, self._dtype, self._untouched = read_back, dtype, untouched
        self._before: int | None = None

    def expected(self, tensors: Tensors) -> int:
        """The digest of a draft that holds this checkpoint. It does not touch the engine."""
        return digest(of_release(tensors, self._dtype))

    def held(self) -> dict[str, int]:
        """What this rank holds, as `digests`. May raise anything; `SwapError` when the target is
        no longer that of the first call."""
        target = digest(self._untouched())
        self._before = target if self._before is None else self._before
        if target != self._before:
            raise SwapError(
                "the target's weights are no longer those of the start: restart this replica"
            )
        return digests(self._read_back())


class _Sum:
    """A digest under way."""

    def __init__(self) -> None:
        self._total = 0
        self._waiting: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def add(self, part: torch.Tensor) -> None:
        alike = self._waiting.setdefault((part.dtype, part.device), [])
        alike.append(part.reshape(-1))
        if sum(map(len, alike)) >= VALUES_AT_ONCE:
            self._total += _sum_of_bits(alike)
            alike.clear()

    def digest(self) -> int:
        waiting = sum(_sum_of_bits(alike) for alike in self._waiting.values() if alike)
        return (self._total + waiting) % _MODULUS


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
