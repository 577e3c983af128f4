"""Swapping the draft inside a vLLM worker, in phases. Each is carried out on all ranks of an engine
before the next begins (`serving/swap/ranks.py`).

    stage(release) ──► thread: read, check sha256, names, shapes and finiteness,
                       build weights beside the draft ──► staged
    put(version) ──► one short RPC between two steps: put them in place, say what is held now
    confirm() ──► keep them as the last good ones      or      put_back() ──► the last good ones

Nothing reaches the live draft before it was compared with the draft the engine started with, and
before all its memory is allocated (`serving/swap/live_draft.py`). A failed swap is undone without
allocating more. Between the phases the engine may step: it then drafts with weights that belong to
no version yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from osd.errors import SwapError
from osd.models.tensor_file import TensorFile
from osd.records import DraftRelease, RankReport, StagingReport
from serving.swap.proof import SwapProof, problem
from serving.swap.shape import WEIGHTS, DraftShape, Tensors, read_release

logger = logging.getLogger(__name__)

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
    """Swaps the draft weights of one worker, which are all of the draft's or one rank's part.
    `begin` starts work without waiting for it."""

    def __init__(
        self,
        release: DraftRelease,
        draft: Draft[Built],
        proof: SwapProof | None = None,
        begin: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self.version = release.version
        self.is_whole = True
        """Whether the weights of `version` are live on all ranks."""
        self._draft, self._proof, self._begin = draft, proof, begin
        self._expected = DraftShape.of(Path(release.path))
        self._staging: Staging[Built] | None = None
        self._put: Staging[Built] | None = None
        """What was put in, until it is confirmed or taken out."""
        first = TensorFile(Path(release.path) / WEIGHTS)
        self._last_checksum = self._checksum(first.tensors())

    def first_report(self) -> RankReport:
        """What the engine has loaded itself; with an error where it cannot be read back."""
        return self._report(time.perf_counter(), *self._try(self._held))

    def stage(self, release: DraftRelease) -> None:
        """Begin to read, validate and build a release; `staging` tells how it goes."""
        staging = Staging[Built](release, time.perf_counter())
        self._staging = staging
        try:
            self._begin(partial(self._read, staging))
        except Exception as error:  # noqa: BLE001  no room for a thread
            staging.error = f"v{release.version}: {_said(error)}"

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
            staging.weights = weights  # set last: from here on it can be put in

    @property
    def staging(self) -> StagingReport:
        """How the newest staging goes."""
        s = self._staging
        if s is None:
            return StagingReport(done=True, error="nothing staged")
        done = s.weights is not None or bool(s.error)
        return StagingReport(version=s.release.version, done=done, error=s.error, seconds=s.seconds)

    def drop(self) -> None:
        """What is staged is not wanted any more."""
        self._staging = None

    def put(self, version: int, is_read: bool = True) -> RankReport:
        """Make the staged release live until `confirm` or `put_back`. The report says what is held
        then, if `is_read`, and what failed."""
        staging, started = self._staging, time.perf_counter()
        if staging is None or staging.release.version != version or staging.weights is None:
            return self._report(started, {}, f"v{version} is not staged")
        self._put, self._staging, self.is_whole = staging, None, False
        weights = staging.weights

        def put_and_read() -> dict[str, int]:
            self._draft.put(weights)
            return self._held() if is_read else {}

        held, error = self._try(put_and_read)
        return self._report(started, held, error, staging.checksum)

    def confirm(self) -> RankReport:
        """What is live now is whole on all ranks: keep it."""
        started = time.perf_counter()
        _, error = self._try(self._keep)
        self.is_whole = not error
        return self._report(started, {}, error)

    def _keep(self) -> None:
        if (put := self._put) is not None and put.weights is not None:
            self._draft.keep(put.weights)
            self._last_checksum, self.version, self._put = put.checksum, put.release.version, None

    def disown(self) -> RankReport:
        """What is live counts for no version until the next swap."""
        self.is_whole = False
        return self._report(time.perf_counter(), {})

    def put_back(self, is_read: bool = True) -> RankReport:
        """Drop what is staged, and restore the last good weights if others were put in. The report
        says what is held then, unless it cannot be read, and what failed."""
        started, self._staging = time.perf_counter(), None
        if self.is_whole:
            return self._report(started, {})
        _, error = self._try(self._draft.put_back)
        self._put, held = None, {}
        if not error and is_read:
            try:
                held = self._held()
            except SwapError as changed:
                error = str(changed)
            except Exception:
                logger.warning("the restored draft could not be read back", exc_info=True)
        return self._report(started, held, error)

    def prove(self) -> str:
        """How the live draft differs from the one confirmed last; "" when it does not. For an
        engine of one rank."""
        held, error = self._try(self._held)
        return error or problem([held], self._last_checksum)

    def _held(self) -> dict[str, int]:
        if self._proof is None:
            raise SwapError("nothing reads it back")
        return self._proof.held()

    def _try(self, act: Callable[[], dict[str, int] | None]) -> tuple[dict[str, int], str]:
        """What `act` returns, and what went wrong."""
        try:
            return act() or {}, ""
        except Exception as error:  # noqa: BLE001  the engine serves on all the same
            return {}, _said(error)

    def _report(
        self, started: float, held: dict[str, int], error: str = "", expected: int | None = None
    ) -> RankReport:
        return RankReport(
            version=self.version,
            seconds=time.perf_counter() - started,
            held=held,
            expected=self._last_checksum if expected is None else expected,
            error=error,
        )

    def _checksum(self, tensors: Tensors) -> int:
        return self._proof.expected(tensors) if self._proof is not None else 0


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, SwapError) else f"{type(error).__name__}: {error}"
