"""An error that an actor raises in its process is raised in the caller's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayTaskError,
)

from osd.errors import AwayError, OSDError, ReplayBufferError
from osd.service.remote import RemoteMethods


class Handle:
    """An actor with one method."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    @property
    def double(self) -> Handle:
        return self

    async def remote(self, number: int, *, add: int = 0) -> int:
        if self._error is not None:
            raise self._error
        return 2 * number + add


def over_there(cause: Exception) -> Any:
    trace = (
        'Traceback (most recent call last):\n  File "there.py", line 7, in double\n'
        f"{type(cause).__name__}: {cause}\n"
    )
    return RayTaskError("double", trace, cause).as_instanceof_cause()


async def test_answers_come_as_they_are() -> None:
    assert await RemoteMethods(Handle(None)).double(4, add=1) == 9


@pytest.mark.parametrize(
    "cause", [OSDError("no room in /data"), ReplayBufferError("Redis is away")]
)
async def test_what_we_raise_keeps_its_type_and_its_line(
    cause: OSDError, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSDError) as caught:
        await RemoteMethods(Handle(over_there(cause))).double(4)
    assert (type(caught.value), str(caught.value)) == (type(cause), str(cause))
    assert caplog.records == []


async def test_a_fault_of_ours_leaves_its_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="^seven$"):
        await RemoteMethods(Handle(over_there(ValueError("seven")))).double(4)
    assert 'File "there.py", line 7' in caplog.text


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("cut off", None)])
async def test_an_actor_whose_process_is_gone_is_away(error: Exception) -> None:
    with pytest.raises(AwayError, match="its process ended, and is started again"):
        await RemoteMethods(Handle(error)).double(4)


async def test_an_actor_that_ray_ended_for_memory_is_away_for_that() -> None:
    with pytest.raises(AwayError, match="as its machine's memory is full"):
        await RemoteMethods(Handle(OutOfMemoryError("low on memory"))).double(4)


async def test_an_actor_that_could_not_start_is_not_said_to_be_started_again() -> None:
    trace = "Traceback (most recent call last):\nValueError: no such device\n"
    cause = RayTaskError("__init__", trace, ValueError("no such device"))
    with pytest.raises(AwayError) as caught:
        await RemoteMethods(Handle(ActorDiedError(cause))).double(4)
    line = "it could not start: ValueError: no such device; restart the service"
    assert str(caught.value) == line
