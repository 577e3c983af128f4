"""Actors as other processes see them: methods that are awaited, and errors that say whether the
process or its machine is gone."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from osd.config.schema import Config
from osd.errors import AwayError, OSDError
from osd.exchange.transfer import FetchedDrafts, are_files
from osd.records import RoundOutcome
from osd.service import cluster
from osd.service.fleet import room
from osd.service.reasons import last_line

logger = logging.getLogger(__name__)

TRAINER_NAME = "trainer"


class RemoteMethods:
    """An actor handle with the methods of the plain object, as coroutines. They raise what the
    object raises, and `AwayError` when its process is gone."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._handle, name))

    async def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        try:
            return await method.remote(*arguments, **named)
        except OutOfMemoryError:
            raise AwayError("Ray ended its process, as its machine's memory is full") from None
        except RayActorError as error:
            if error.actor_init_failed:
                why = f"it could not start: {last_line(error)}; restart the service"
                raise AwayError(why) from None
            raise AwayError("its process ended, and is started again") from None
        except RayTaskError as error:  # its text is the traceback in the actor's process
            if not isinstance(error.cause, OSDError):
                logger.error("%s", error)
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


class RemoteTrainer(RemoteMethods):
    """An `osd.control.protocols.Trainer`: the handle of a `TrainerActor`."""

    def __init__(self, handle: Any, config: Config) -> None:
        super().__init__(handle)
        self._resource, self._num_gpus = config.ray.trainer_resource, config.trainer.num_gpus
        self._fetched = FetchedDrafts(config.data_path / "fetched-candidates", keep=1)

    async def candidate(self, outcome: RoundOutcome) -> str:
        """Its directory on this machine."""
        return await asyncio.to_thread(self._candidate, outcome)

    def _candidate(self, outcome: RoundOutcome) -> str:
        if are_files(Path(outcome.path), outcome.files):
            return outcome.path
        read = partial(cluster.call, TRAINER_NAME, "read_candidate", outcome.path, outcome.files)
        return str(self._fetched.fetch(outcome.files, read))

    async def why_silent(self) -> str:
        """What the cluster lacks; "" where nothing is known to be missing."""
        import ray

        try:
            there = await asyncio.wait_for(asyncio.to_thread(ray.cluster_resources), 5)
        except Exception as error:  # noqa: BLE001  whatever Ray raises when its head is gone
            return f"the Ray cluster does not answer either ({type(error).__name__})"
        asked = self._resource, self._num_gpus, "trainer_resource", "trainer.num_gpus"
        return room.lacking(there, *asked)
