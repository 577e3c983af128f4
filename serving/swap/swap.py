"""Swapping the draft inside a vLLM worker: stage and validate in a thread, commit between two
engine steps.

    stage(release) ──► thread: read, check sha256, names, shapes and finiteness,
                       build weights beside the draft ──► staged
    commit(version) ──► one short RPC: put them in place, prove it, keep them as the last good ones
          └─ anything raised, or other weights found: put the last good ones back

Nothing reaches the live draft before it was compared with the draft the engine started with, and
before all its memory is allocated (`serving/swap/live_draft.py`). A failed swap is undone without
allocating more.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from osd.common.files import sha256
from osd.errors import SwapError
from osd.models.heads import draft_head
from osd.records import DraftRelease, StagingReport
from serving.swap.proof import SwapProof

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
"""Entries of `config.json` that must not change, since only weights are swapped."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The form of the draft the engine started with, which every release must have."""

    shapes: Mapping[str, tuple[int, ...]]
    architecture: Mapping[str, object]
    masks: frozenset[str]
    """Names of tensors of integers or booleans, which older checkpoints (Pythia) hold as masks."""

    @classmethod
    def of(cls, directory: Path) -> DraftShape:
        """The form of the draft in a directory. Raises `SwapError` for a draft head."""
        with safe_open(directory / WEIGHTS, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
        masks = frozenset(n for n, dtype in dtypes.items() if dtype == "BOOL" or dtype[0] in "IU")
        config = json.loads((directory / "config.json").read_text())
        refuse_head(config)
        return cls(shapes, {key: config.get(key) for key in ARCHITECTURE_KEYS}, masks)


def read_release(release: DraftRelease, expected: DraftShape) -> dict[str, torch.Tensor]:
    """The tensors of a release. Raises `SwapError` saying what does not fit."""
    directory = Path(release.path)
    try:
        digest = sha256(directory / WEIGHTS)
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SwapError(f"{directory} cannot be read: {error}") from None
    if digest != release.sha256:
        raise SwapError(
            f"sha256 of {WEIGHTS} is {digest[:12]}, release.json says {release.sha256[:12]}"
        )
    refuse_head(config)
    for key, value in expected.architecture.items():
        if config.get(key) != value:
            raise SwapError(f"config.json has {key}={config.get(key)!r}, the engine runs {value!r}")
    try:
        tensors = load_file(directory / WEIGHTS)
    except Exception as error:  # noqa: BLE001  safetensors raises its own types for damaged files
        raise SwapError(f"{WEIGHTS} is damaged: {error}") from None
    check_tensors(tensors, expected)
    return tensors


def refuse_head(config: Mapping[str, object]) -> None:
    """Raise `SwapError` for the `config.json` of a draft head, which shares tensors with the
    target."""
    if what := draft_head(config):
        raise SwapError(
            f"it is a draft head ({what}), and heads are not served: only draft models of their "
            "own are"
        )


def check_tensors(tensors: Tensors, expected: DraftShape) -> None:
    """Raise `SwapError` unless names and shapes are as expected and every number is finite."""
    shapes = expected.shapes
    if missing := sorted(set(shapes) - set(tensors)):
        raise SwapError(f"{len(missing)} tensors are missing, first {missing[0]}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise SwapError(f"{len(unknown)} tensors are unknown, first {unknown[0]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise SwapError(f"{name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if name in expected.masks:
            continue
        if not tensor.is_floating_point():
            raise SwapError(f"{name} is {tensor.dtype}, expected floating point")
        if not torch.isfinite(tensor).all():
            raise SwapError(f"{name} holds NaN or infinite values")


Built = TypeVar("Built")
"""Weights in the form a live draft keeps them."""


@dataclass(slots=True)
class Staging(Generic[Built]):
    """State of one staging. It runs while `weights` is None and `error` is empty."""

    release: DraftRelease
    started: float
    seconds: float = 0.0
    weights: Built | None = None
    checksum: int = 0
    """Expected checksum of the live draft after the swap."""
    error: str = ""


class Draft(Protocol[Built]):
    """A live draft (`serving/swap/live_draft.py`)."""

    def build(self, tensors: Tensors) -> Built:
        """Weights in the form of the live draft, which stays as it is. May raise anything."""

    def put(self, weights: Built) -> None:
        """Make them live. When it raises, some of them may be live."""

    def keep(self, weights: Built) -> None:
        """Make these the weights that `put_back` restores."""

    def put_back(self) -> None:
        """Restore the weights kept last, or those of the start. It allocates nothing."""


def in_thread(work: Callable[[], None]) -> None:
    """Begin the work beside the engine."""
    threading.Thread(target=work, name="osd-stage", daemon=True).start()


class DraftSwapper(Generic[Built]):
    """Swaps the draft weights of one worker. `prove` makes the proof from the weights of the first
    draft. `begin` starts work without waiting for it."""

    def __init__(
        self,
        release: DraftRelease,
        draft: Draft[Built],
        prove: Callable[[Tensors], SwapProof] | None = None,
        begin: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self.version = release.version
        self._draft, self._begin = draft, begin
        self._expected = DraftShape.of(Path(release.path))
        self._staging: Staging[Built] | None = None
        first = load_file(Path(release.path) / WEIGHTS)
        self.proof = prove(first) if prove is not None else None
        self._last_checksum = self._checksum(first)

    def stage(self, release: DraftRelease) -> None:
        """Begin to read, validate and build a release; `staging` tells how it goes."""
        staging = Staging[Built](release, time.perf_counter())
        self._staging = staging
        self._begin(partial(self._read, staging))

    def _read(self, staging: Staging[Built]) -> None:
        try:
            tensors = read_release(staging.release, self._expected)
            staging.checksum = self._checksum(tensors)
            weights = self._draft.build(tensors)
        except Exception as error:  # noqa: BLE001  a bad release must not disturb the old draft
            staging.seconds = time.perf_counter() - staging.started
            staging.error = f"v{staging.release.version}: {_said(error)}"
        else:
            staging.seconds = time.perf_counter() - staging.started
            staging.weights = weights  # set last: from here on it can be committed

    @property
    def staging(self) -> StagingReport:
        """How the newest staging goes."""
        s = self._staging
        if s is None:
            return StagingReport(done=True, error="nothing staged")
        done = s.weights is not None or bool(s.error)
        return StagingReport(version=s.release.version, done=done, error=s.error, seconds=s.seconds)

    def commit(self, version: int) -> float:
        """Make the staged release live. Returns the seconds taken. Raises `SwapError` when the old
        draft still serves."""
        staging, started = self._staging, time.perf_counter()
        if staging is None or staging.release.version != version or staging.weights is None:
            raise SwapError(f"v{version} is not staged")
        try:
            self._draft.put(staging.weights)
            if problem := self._problem(staging.checksum):
                raise SwapError(problem)
        except Exception as error:
            self._put_back(f"v{version}: {_said(error)}")
            raise SwapError(
                f"v{version}: loading failed, the previous draft was restored: {_said(error)}"
            ) from error
        self._draft.keep(staging.weights)
        self._last_checksum = staging.checksum
        self.version, self._staging = version, None
        return time.perf_counter() - started

    def prove(self) -> str:
        """How the live draft differs from the one committed last; "" when it does not, or when
        swaps cannot be proved here."""
        return self._problem(self._last_checksum)

    def _problem(self, checksum: int) -> str:
        return self.proof.problem(checksum) if self.proof is not None else ""

    def _put_back(self, why: str) -> None:
        """Restore the last good weights. Raises `SwapError` when that fails too: drafts are then
        useless until the next swap, while answers stay right."""
        problem = ""
        try:
            self._draft.put_back()
        except Exception as error:  # noqa: BLE001  the engine serves on all the same
            problem = _said(error)
        else:
            with suppress(Exception):  # proving takes memory, and there may be none left
                problem = self.prove()
        if problem:
            raise SwapError(
                f"{why}; and the previous draft could not be restored: {problem}; restart this "
                "replica"
            )

    def _checksum(self, tensors: Tensors) -> int:
        if self.proof is None or self.proof.why_not:
            return 0
        return self.proof.expected(tensors)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, SwapError) else f"{type(error).__name__}: {error}"
