"""Two services of one name on one Redis: the second one does not start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osd.config import reading
from osd.errors import ConfigError
from osd.records import ReplicaStatus
from osd.service.fleet.alone import wait_until_alone
from tests.support.clocks import HandClock
from tests.unit.osd.control.test_controller import replica

CONFIG = reading.load(overrides=["serving.replicas=2"], environ={}).config


class Beating:
    """Replicas whose hearts beat once a second, until some time."""

    def __init__(self, *names: str, until: float = 1e9) -> None:
        self.names, self.until = names, until
        self.clock = HandClock()
        self.begun = self.clock.monotonic()

    @property
    def seconds(self) -> float:
        return self.clock.monotonic() - self.begun

    def replicas(self) -> list[ReplicaStatus]:
        if self.seconds > self.until + 10:
            return []  # a heartbeat lasts for so long
        at = float(int(min(self.seconds, self.until)))
        return [replace(replica(1, name), at=at) for name in self.names]

    def wait(self) -> float:
        """How long it took."""
        wait_until_alone(self, CONFIG, self.clock.monotonic, self.clock.move)  # type: ignore[arg-type]
        return self.seconds


@pytest.mark.parametrize("names", [(), ("earlier-0",), ("replica-2", "gpu-2-8000")])
def test_a_name_that_is_free_is_not_waited_for(names: tuple[str, ...]) -> None:
    assert Beating(*names).wait() == 0


@pytest.mark.parametrize("names", [("replica-0",), ("replica-1", "earlier-0")])
def test_a_service_of_the_same_name_is_refused(names: tuple[str, ...]) -> None:
    beating = Beating(*names)
    with pytest.raises(ConfigError) as refused:
        beating.wait()
    assert str(refused.value) == (
        f"deployment=default: {names[0]} of another service of that name lives at "
        "http://127.0.0.1:8000, on the same Redis; name another with deployment=NAME, or end that "
        "service"
    )
    assert beating.seconds == 20


@pytest.mark.parametrize(("until", "waited"), [(-1, 4), (3, 7), (15, 19)])
def test_one_that_has_ended_is_forgotten(until: float, waited: float) -> None:
    """It was killed just now: its last heartbeat is still there, or its engine is just ending."""
    assert Beating("replica-0", until=until).wait() == pytest.approx(waited, abs=1)
