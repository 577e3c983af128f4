"""Swapping the draft inside a vLLM worker: stage and validate in a thread, commit between two engine steps.

    stage(release) ──► thread: read, sha256, names, shapes, finiteness ──► staged
    commit(version) ──► one short RPC: load in place, prove it landed, keep the last good weights ──► serving
          └─ anything raised, or other weights found: load the last good ones again ──► the old draft serves on

A checkpoint that lacks tensors or holds wrong shapes would leave vLLM's draft half loaded and end the engine at the
next step, so nothing reaches the live draft before it has been compared with the draft the engine started with.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from osd.errors import SwapError
from osd.files import sha256
from osd.records import DraftRelease
from serving.proof import SwapProof

WEIGHTS = "model.safetensors"
ARCHITECTURE_KEYS = (
    "architectures",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rotary_pct",
    "use_parallel_residual",
    "max_position_embeddings",
)
"""Entries of `config.json` that must not change from one draft to the next: weights alone are swapped."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What every release must look like: that of the draft the engine started with."""

    shapes: Mapping[str, tuple[int, ...]]
    architecture: Mapping[str, object]
    masks: frozenset[str]
    """Names of tensors that are not numbers: masks, which older checkpoints (Pythia) hold as well."""

    @classmethod
    def of(cls, directory: Path) -> DraftShape:
        with safe_open(directory / WEIGHTS, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            masks = frozenset(
                n for n, part in slices.items() if part.get_dtype() == "BOOL" or part.get_dtype()[0] in "IU"
            )
        config = json.loads((directory / "config.json").read_text())
        return cls(shapes, {key: config.get(key) for key in ARCHITECTURE_KEYS}, masks)


def read_release(release: DraftRelease, expected: DraftShape) -> dict[str, torch.Tensor]:
    """The tensors of a release, proved to fit. Raises `SwapError` saying what does not."""
    directory = Path(release.path)
    try:
        digest = sha256(directory / WEIGHTS)
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SwapError(f"v{release.version}: {directory} cannot be read: {error}") from None
    if digest != release.sha256:
        raise SwapError(
            f"v{release.version}: sha256 of {WEIGHTS} is {digest[:12]}, release.json says {release.sha256[:12]}"
        )
    for key, value in expected.architecture.items():
        if config.get(key) != value:
            raise SwapError(f"v{release.version}: config.json has {key}={config.get(key)!r}, the engine runs {value!r}")
    try:
        tensors = load_file(directory / WEIGHTS)
    except Exception as error:  # noqa: BLE001  safetensors raises its own types for damaged files
        raise SwapError(f"v{release.version}: {WEIGHTS} is damaged: {error}") from None
    check_tensors(tensors, expected, f"v{release.version}")
    return tensors


def check_tensors(tensors: Tensors, expected: DraftShape, what: str) -> None:
    """Raise `SwapError` unless names and shapes are those expected and every number is finite."""
    shapes = expected.shapes
    if missing := sorted(set(shapes) - set(tensors)):
        raise SwapError(f"{what}: {len(missing)} tensors are missing, first {missing[0]}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise SwapError(f"{what}: {len(unknown)} tensors are unknown, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise SwapError(f"{what}: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if name in expected.masks:
            continue
        if not tensor.is_floating_point():
            raise SwapError(f"{what}: {name} is {tensor.dtype}, expected floating point")
        if not torch.isfinite(tensor).all():
            raise SwapError(f"{what}: {name} holds NaN or infinite values")


@dataclass(slots=True)
class Staging:
    """State of one staging: running while `tensors` is None and `error` is empty."""

    release: DraftRelease
    started: float
    seconds: float = 0.0
    tensors: dict[str, torch.Tensor] | None = None
    checksum: int = 0
    """What the proof of the swap will be compared with."""
    error: str = ""


class DraftSwapper:
    """The draft weights of one worker.

    `load` puts tensors into the live draft (and may raise half-way); `prove`, given those of the first draft, returns
    what compares the live draft with a release.
    """

    def __init__(
        self,
        release: DraftRelease,
        load: Callable[[Tensors], None],
        shared_with_target: set[str] | None = None,
        prove: Callable[[Tensors], SwapProof] | None = None,
    ) -> None:
        self.version = release.version
        self._load = load
        self._shared = shared_with_target or set()
        self._expected = DraftShape.of(Path(release.path))
        self._last_good: Tensors = self._without_shared(load_file(Path(release.path) / WEIGHTS))
        self._staging: Staging | None = None
        self.proof = prove(self._last_good) if prove is not None else None
        self._last_checksum = self._checksum(self._last_good)

    def stage(self, release: DraftRelease) -> None:
        """Read and validate a release in a thread; `staging` tells how it went."""
        staging = Staging(release, time.perf_counter())
        self._staging = staging
        threading.Thread(target=self._read, args=(staging,), name="osd-stage", daemon=True).start()

    def _read(self, staging: Staging) -> None:
        try:
            tensors = self._without_shared(read_release(staging.release, self._expected))
            staging.checksum = self._checksum(tensors)
            staging.tensors = tensors  # last: whoever sees it may commit
        except SwapError as error:
            staging.error = str(error)
        except Exception as error:  # noqa: BLE001  whatever is wrong with a release, the old draft serves on
            staging.error = f"v{staging.release.version}: {type(error).__name__}: {error}"
        staging.seconds = time.perf_counter() - staging.started

    @property
    def staging(self) -> dict[str, object]:
        """`{"version", "done", "error", "seconds"}` of the newest staging."""
        s = self._staging
        if s is None:
            return {"version": 0, "done": True, "error": "nothing staged", "seconds": 0.0}
        done = s.tensors is not None or bool(s.error)
        return {"version": s.release.version, "done": done, "error": s.error, "seconds": s.seconds}

    def commit(self, version: int) -> float:
        """Make the staged release the live draft; returns seconds taken. Raises `SwapError`, the old one serving."""
        staging, started = self._staging, time.perf_counter()
        if staging is None or staging.release.version != version or staging.tensors is None:
            raise SwapError(f"v{version} is not staged")
        try:
            self._load(staging.tensors)
            if problem := self._problem(staging.checksum):
                raise SwapError(problem)
        except Exception as error:
            self._restore(f"v{version}: {error}")
            raise SwapError(f"v{version}: loading failed, the previous draft was restored: {error}") from error
        self._last_good, self._last_checksum = staging.tensors, staging.checksum
        self.version, self._staging = version, None
        return time.perf_counter() - started

    def prove(self) -> str:
        """In what the live draft is not the one committed last; "" when it is, or when that cannot be known here."""
        return self._problem(self._last_checksum)

    def _problem(self, checksum: int) -> str:
        return self.proof.problem(checksum) if self.proof is not None else ""

    def _restore(self, why: str) -> None:
        """Load the last good weights. Raises `SwapError` when even they do not arrive: drafts are useless then, while
        answers stay what they are, and the next swap may mend it."""
        try:
            self._load(self._last_good)
            problem = self.prove()
        except Exception as error:  # noqa: BLE001  whatever it was, the engine serves on
            problem = str(error)
        if problem:
            raise SwapError(f"{why}; and the previous draft could not be restored: {problem}; restart this replica")

    def _checksum(self, tensors: Tensors) -> int:
        return self.proof.expected(tensors) if self.proof is not None and not self.proof.why_not else 0

    def _without_shared(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self._shared}
