"""Features of texts that were computed before: replayed and held-out texts come again and again.

    a packed batch ─► its texts ─► those not kept are computed, packed anew ─► the batch's features

Kept in host memory, in the type the target computes in, the least recently used out first.

Legend: B lines, S tokens, T tokens of one text, F features.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.pack import Layout, pack

Compute = Callable[[Tensor, Tensor], Tensor]
"""ids_BS, position_ids_BS -> features_BSF"""


class Text(NamedTuple):
    """Where a text lies in a batch."""

    line: int
    start: int
    end: int


class FeatureCache:
    """At most `max_bytes` of features, `width` numbers a token; 0 keeps none. `arrange` says where
    texts lie when they are computed: `pack` where the target keeps texts on one line apart."""

    def __init__(
        self, width: int, max_bytes: int, arrange: Callable[[Sequence[int]], Layout] = pack
    ) -> None:
        self._width, self._max_bytes, self._arrange = width, max_bytes, arrange
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0

    def features(self, ids_BS: Tensor, position_ids_BS: Tensor, compute: Compute) -> Tensor:
        """Those of a batch; zeros in the padding and at texts of one token, which no head reads."""
        texts = texts_of(position_ids_BS)
        tokens = [ids_BS[text.line, text.start : text.end] for text in texts]
        keys = [ids_T.cpu().numpy().tobytes() for ids_T in tokens]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        missing = {key: ids_T for key, ids_T in zip(keys, tokens, strict=True) if key not in found}
        found |= dict(zip(missing, self._computed(list(missing.values()), compute), strict=True))
        for key in keys:
            self._keep(key, found[key])
        features_BSF = torch.zeros(*ids_BS.shape, self._width)
        for text, key in zip(texts, keys, strict=True):
            features_BSF[text.line, text.start : text.end] = found[key].float()
        return features_BSF

    def clear(self) -> None:
        """Forget all texts."""
        self._kept.clear()
        self.num_bytes = 0

    def _keep(self, key: bytes, features_TF: Tensor) -> None:
        if key not in self._kept:
            self.num_bytes += features_TF.nbytes
        self._kept[key] = features_TF
        self._kept.move_to_end(key)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def _computed(self, texts: Sequence[Tensor], compute: Compute) -> list[Tensor]:
        """[T, F] of each text, on the host."""
        if not texts:
            return []
        places, num_lines, length = self._arrange([len(ids_T) for ids_T in texts])
        ids_BS = torch.zeros(num_lines, length, dtype=torch.int64)
        position_ids_BS = torch.zeros_like(ids_BS)
        for ids_T, place in zip(texts, places, strict=True):
            end = place.start + len(ids_T)
            ids_BS[place.line, place.start : end] = ids_T.cpu()
            position_ids_BS[place.line, place.start : end] = torch.arange(len(ids_T))
        features_BSF = compute(ids_BS, position_ids_BS).cpu()
        return [
            features_BSF[place.line, place.start : place.start + len(ids_T)].clone()
            for ids_T, place in zip(texts, places, strict=True)
        ]


def texts_of(position_ids_BS: Tensor) -> list[Text]:
    """The texts of more than one token: runs in which positions count from 0."""
    found = []
    for line, positions in enumerate(position_ids_BS.tolist()):
        starts = [s for s, position in enumerate(positions) if position == 0]
        spans = zip(starts, [*starts[1:], len(positions)], strict=True)
        found += [Text(line, start, end) for start, end in spans if end - start > 1]
    return found
