"""Passes of a model over a batch of trees, with the KV cache of each request in slots.

    slots of a request:  [ context ........ | free | open nodes ............ ]
    feed  ─► new nodes behind the open ones, each seeing the context and its ancestors
    keep  ─► the accepted ones are copied behind the context, all others forgotten

A prompt is a tree too, one without branches. Requests have contexts of their own length; their open
nodes begin at the same slot, behind the longest context.

Legend: B requests, N nodes fed in a pass, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from serving.trees.tree import ancestry


class Passes:
    """A Hugging Face causal model that answers `num_requests` requests together.

    num_slots: room for each: its longest context, and the open nodes of a step
    """

    def __init__(self, model: Any, num_requests: int, num_slots: int) -> None:
        self._model = model
        self._layers = [_Slots(num_slots) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._lengths = [0] * num_requests
        self._forget()
        self.num_passes = 0
        self.num_fed = 0
        """Nodes that were computed, padding left out."""

    @torch.no_grad()
    def feed(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        *,
        last_alone: bool = False,
    ) -> list[Tensor]:
        """Logits [N, V] of each request's new nodes, on the CPU; a request may have none.

        parents: the parent of each among all open nodes of its request, in the order in which they
            were fed; -1 = the end of the context
        last_alone: of the last place of the pass only, [1, V]
        """
        width, start = max(map(len, tokens)), self._layers[0].length
        ids_BN, positions_BN = np.zeros((2, len(tokens), width), dtype=int)
        sees_BNS = np.zeros((len(tokens), width, start + width), dtype=bool)
        sees_BNS[:, np.arange(width), start + np.arange(width)] = True  # padding sees itself
        for request, (new, above) in enumerate(zip(tokens, parents, strict=True)):
            num = len(new)
            self._open(request, above, start)
            ids_BN[request, :num] = new
            length = self._lengths[request]
            positions_BN[request, :num] = length + self._depths_of_last(request, num)
            sees_BNS[request, :num, :length] = True
            seen = ancestry(self._parents[request])[len(self._parents[request]) - num :]
            sees_BNS[request, :num, self._slots[request]] = seen.T
        self.num_passes += 1
        self.num_fed += sum(map(len, tokens))
        logits_BNV = self._forward(ids_BN, positions_BN, sees_BNS, int(last_alone))
        return [row[: len(new)] for row, new in zip(logits_BNV, tokens, strict=True)]

    def keep(self, nodes: Sequence[Sequence[int]]) -> None:
        """Continue each context by a path of open nodes, and forget all others."""
        requests, sources, goals = list[int](), list[int](), list[int]()
        for request, path in enumerate(nodes):
            requests += [request] * len(path)
            sources += [self._slots[request][node] for node in path]
            goals += range(self._lengths[request], self._lengths[request] + len(path))
            self._lengths[request] += len(path)
        for layer in self._layers:
            layer.move(requests, sources, goals)
        self._forget()

    def select(self, requests: Sequence[int]) -> None:
        """Go on with these requests alone, in this order."""
        self._lengths = [self._lengths[request] for request in requests]
        for layer in self._layers:
            layer.select(requests)
        self._forget()

    def _forget(self) -> None:
        """No node is open."""
        for layer in self._layers:
            layer.length = max(self._lengths, default=0)
        self._parents: list[list[int]] = [[] for _ in self._lengths]
        self._depths: list[list[int]] = [[] for _ in self._lengths]
        self._slots: list[list[int]] = [[] for _ in self._lengths]

    def _depths_of_last(self, request: int, num: int) -> np.ndarray:
        depths = self._depths[request]
        return np.array(depths[len(depths) - num :], dtype=int)

    def _open(self, request: int, parents: Sequence[int], start: int) -> None:
        depths = self._depths[request]
        for i, parent in enumerate(parents):
            self._parents[request].append(parent)
            self._slots[request].append(start + i)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)

    def _forward(
        self, ids_BN: np.ndarray, positions_BN: np.ndarray, sees_BNS: np.ndarray, num_logits: int
    ) -> Tensor:
        device, dtype = self._model.device, self._model.dtype
        sees = torch.from_numpy(sees_BNS).to(device)
        hidden = torch.full(sees.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
        found = self._model(
            input_ids=torch.from_numpy(ids_BN).to(device),
            position_ids=torch.from_numpy(positions_BN).to(device),
            attention_mask=hidden.masked_fill(sees, 0.0)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        logits: Tensor = found.logits.float().cpu()
        return logits


class _Slots(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, S, head size]: `length` slots are in use."""

    keys: Tensor
    values: Tensor

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, size = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self._num_slots, size)
        size = value_states.shape[-1]
        self.values = value_states.new_zeros(batch, heads, self._num_slots, size)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def move(self, requests: Sequence[int], sources: Sequence[int], goals: Sequence[int]) -> None:
        """Copy slots of requests, read before any is written."""
        of, start, end = (torch.tensor(i, dtype=torch.long) for i in (requests, sources, goals))
        for tensor in (self.keys, self.values):
            tensor[of, :, end] = tensor[of, :, start]

    def select(self, requests: Sequence[int]) -> None:
        self.keys, self.values = self.keys[list(requests)], self.values[list(requests)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._num_slots
