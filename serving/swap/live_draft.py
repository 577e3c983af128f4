"""The weights of a live draft. New ones are built beside it, in the form its layers keep them, and
then put in place.

    build(release) ──► a twin of each layer, loaded and packed as the engine does it ──► Weights
    put(weights)   ──► values are copied into the tensors that serve, packed matrices exchanged
    put_back()     ──► the same with the weights that were kept last

Only `build` allocates memory, and it leaves the live draft as it is. A swap that runs out of memory
can therefore always be undone. Live tensors keep their addresses, as CUDA graphs and compiled code
need it. New weights lie on the host, so no device has to hold a draft twice.

Tensors of the target are recognised by its modules and its memory, not by names: an EAGLE head has
another name for the target's embedding. A release that carries them too, value for value, leaves
them untouched; one that carries others is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from osd.errors import SwapError
from serving.swap.proof import EMBEDDINGS, HEADS, VALUES_AT_ONCE

Tensors = Mapping[str, torch.Tensor]
STRUCTURE = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its tensors and its submodules."""


@dataclass(slots=True, frozen=True)
class Weights:
    """A draft's weights in the form its layers keep them."""

    values: dict[torch.Tensor, torch.Tensor]
    """live tensor -> its new values, on the host"""
    attributes: dict[tuple[nn.Module, str], Any]
    """(live layer, attribute) -> what is no tensor, such as a matrix packed for a kernel"""


class LiveDraft:
    """A draft model that serves. It has a `load_weights` as vLLM's models do.

    `unpacked(layer, twin)` gives parameters for the twin of a layer in the form a checkpoint fills,
    where the engine has packed them since. `pack(twin)` packs a loaded twin.
    """

    def __init__(
        self,
        model: nn.Module,
        target: nn.Module | None = None,
        unpacked: Callable[[nn.Module, nn.Module], Tensors] = lambda layer, twin: {},
        pack: Callable[[nn.Module], None] = lambda twin: None,
    ) -> None:
        self._model, self._unpacked, self._pack = model, unpacked, pack
        self._target = Owned(target)
        tensors = {tensor for layer in model.modules() for tensor in tensors_of(layer).values()}
        own = (tensor for tensor in tensors if tensor.numel() and tensor not in self._target)
        self._kept = Weights({live: live.detach().to("cpu", copy=True) for live in own}, {})

    @torch.no_grad()
    def build(self, tensors: Tensors) -> Weights:
        """Build the weights of a checkpoint. Raises `SwapError` when loading them would write into
        the target or a layer does not pack them as before; may also raise what the model's loader
        and allocations raise."""
        twins = self._twins()
        with Writes(self._target) as writes:
            twins[self._model].load_weights(list(tensors.items()))  # type: ignore[operator]
        built = Weights({}, {})
        for layer, twin in twins.items():
            filled = tensors_of(twin)
            loaded = {name for name, tensor in filled.items() if storage(tensor) in writes.storages}
            if not loaded:
                continue
            self._pack(twin)
            packed = tensors_of(twin)
            for name, live in tensors_of(layer).items():
                if name in loaded or packed.get(name) is not filled[name]:
                    built.values[live] = _fitting(
                        packed.get(name), live, f"{type(layer).__name__}.{name}"
                    )
            for name, held in vars(twin).items():
                if name not in STRUCTURE and held is not vars(layer).get(name):
                    built.attributes[layer, name] = held
        for layer, name in built.attributes:
            self._kept.attributes.setdefault((layer, name), vars(layer).get(name))
        return built

    def put(self, weights: Weights) -> None:
        """Make these weights live. It allocates nothing, so it cannot run out of memory."""
        with torch.no_grad():
            for (layer, name), held in weights.attributes.items():
                vars(layer)[name] = held
            for live, values in weights.values.items():
                live.data.copy_(values)

    def keep(self, weights: Weights) -> None:
        """Make these the weights that `put_back` restores."""
        self._kept.values.update(weights.values)
        self._kept.attributes.update(weights.attributes)

    def put_back(self) -> None:
        """Restore, bit for bit, the weights that were kept last."""
        self.put(self._kept)

    def _twins(self) -> dict[nn.Module, nn.Module]:
        """For each layer a copy that shares everything but tensors and submodules. Layers of the
        target stay themselves."""
        layers = list(self._model.modules())
        twins = {
            layer: layer if layer in self._target.modules else _shallow(layer) for layer in layers
        }
        made: dict[torch.Tensor, torch.Tensor] = {}
        for layer, twin in twins.items():
            if twin is layer:
                continue
            unpacked = self._unpacked(layer, twin)
            for name, live in tensors_of(layer).items():
                if live not in made and live not in self._target:
                    made[live] = unpacked[name] if name in unpacked else _copy(live)
            own = {
                kind: {n: made.get(t, t) for n, t in vars(layer)[kind].items()}
                for kind in ("_parameters", "_buffers")
            }
            own["_parameters"] = {**unpacked, **own["_parameters"]}
            vars(twin).update(
                own, _modules={n: twins.get(part) for n, part in vars(layer)["_modules"].items()}
            )
        return twins


class Owned:
    """The tensors of a model, recognised by the address of their values."""

    def __init__(self, model: nn.Module | None) -> None:
        self.modules = set(model.modules()) if model is not None else set()
        named = [*model.named_parameters(), *model.named_buffers()] if model is not None else []
        self._names = {storage(tensor): name for name, tensor in named if storage(tensor)}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) in self._names

    def name_of(self, tensor: torch.Tensor) -> str:
        """The tensor's name in the model."""
        return self._names[storage(tensor)]


class Writes(TorchDispatchMode):
    """Notes which memory is written to. What is written to a forbidden tensor is left out where it
    holds these values already; otherwise `SwapError` is raised before it is written."""

    def __init__(self, forbidden: Owned) -> None:
        super().__init__()
        self._forbidden = forbidden
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _written(func, args, kwargs or {}):
            if tensor in self._forbidden:
                if not _holds_already(func, args):
                    raise SwapError(_another(self._forbidden.name_of(tensor)))
                return tensor
            self.storages.add(storage(tensor))
        return func(*args, **(kwargs or {}))


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a layer, without those of its submodules."""
    both = {**vars(layer)["_parameters"], **vars(layer)["_buffers"]}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def storage(tensor: torch.Tensor) -> int:
    """Address of the values; 0 where there are none. Views of one tensor share it."""
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = given if isinstance(given, list) else [given]
            yield from (t for t in tensors if isinstance(t, torch.Tensor) and t.numel())


def _holds_already(func: Any, args: Sequence[Any]) -> bool:
    """Whether writing like this changes nothing. It is compared on the host and in parts: there may
    be no room for another tensor of this size beside it."""
    name = func._schema.name
    if name not in ("aten::copy_", "aten::fill_", "aten::zero_"):
        return False
    held, given = args[0], args[1] if len(args) > 1 else 0
    values = torch.as_tensor(given, dtype=held.dtype).expand_as(held)
    held, values = torch.atleast_1d(held), torch.atleast_1d(values)
    rows = max(1, VALUES_AT_ONCE * len(held) // held.numel())
    pairs = zip(held.split(rows), values.split(rows), strict=True)
    return all(torch.equal(part.cpu(), new.cpu()) for part, new in pairs)


def _another(name: str) -> str:
    """Why a release is refused that would change this tensor of the target."""
    kinds = (("embedding", EMBEDDINGS), ("output head", HEADS))
    kind = next((kind for kind, parts in kinds if set(name.split(".")) & set(parts)), "tensor")
    return (
        f"it carries another {kind} than the target's, with which the draft computes: loading it "
        f"would write into the target's {name}"
    )


def _shallow(layer: nn.Module) -> nn.Module:
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    return twin


def _copy(live: torch.Tensor) -> torch.Tensor:
    """A copy on the host, with the attributes the engine has set on it, such as its loader."""
    copied = live.detach().to("cpu", copy=True)
    copied.__class__, copied.__dict__ = live.__class__, dict(vars(live))
    return copied


def _fitting(made: torch.Tensor | None, live: torch.Tensor, name: str) -> torch.Tensor:
    if made is None or made.shape != live.shape:
        # Packing may silently stop half-way, and the layer would go on with an empty matrix.
        found = "nothing" if made is None else f"shape {tuple(made.shape)}"
        raise SwapError(
            f"{name} is kept as {found}, the engine serves with shape {tuple(live.shape)}"
        )
    return made.detach().to("cpu")
