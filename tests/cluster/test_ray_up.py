"""`ray up` with the file we ship, from a third host: the head serves, the worker trains. The tests
are one story, in this order."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.commands import OSD, ask, asking, ray, status, wait_for_end, wait_until_well
from tests.cluster.conftest import write_configuration
from tests.cluster.hosts import Hosts
from tests.support.paths import ROOT
from tests.support.services import wait_until

pytestmark = pytest.mark.timeout(900)

SERVICE = ("osd serve", "gcs_server", "ReplicaActor", "ControlActor", "EngineCore")
"""What runs on the head."""
TRAINING = ("raylet/raylet", "TrainerActor")
"""What runs on the worker."""


@pytest.fixture(scope="module")
def up(hosts: Hosts) -> Iterator[Hosts]:
    write_configuration(hosts)
    said = ray(hosts, "up")
    assert "serving: http://0.0.0.0:8000/v1" in said
    yield hosts


def test_what_is_running_passes_its_own_check(up: Hosts) -> None:
    done = up["laptop"].run(f"cd {ROOT} && {OSD} cluster check ~/cluster.yaml")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for line in ("versions equal on all machines", "target ~/pair/target equal on all"):
        assert line in done.stdout
    print(done.stdout)


def test_a_draft_learns_on_the_worker_and_serves_on_the_head(up: Hosts) -> None:
    (first,) = ask(up, 1)
    found = first
    deadline = time.monotonic() + 180
    while found["alpha"] < first["alpha"] + 0.3 and time.monotonic() < deadline:
        (found,) = ask(up, 1)
        assert found["errors"] == []
        assert found["digest"] == first["digest"], "whatever draft serves"
    print(f"α {first['alpha']:.2f}, then {found['alpha']:.2f}")
    assert found["alpha"] > first["alpha"] + 0.3
    assert len(up["worker"].named("TrainerActor")) == 1 and not up["head"].named("TrainerActor")
    assert up["head"].named("EngineCore", "ReplicaActor") and not up["worker"].named("EngineCore")
    for name in ("head", "worker"):
        assert (up[name].home / "osd-data/releases").exists() is (name == "head")
        assert (up[name].home / "osd-data/trainer").exists() is (name == "worker")
    wait_until_well(up["head"], 150)


def test_ray_up_again_restarts_nothing(up: Hosts) -> None:
    before = up["head"].named(*SERVICE), up["worker"].named(*TRAINING)
    assert "nothing has changed: Ray and the service run on" in ray(up, "up")
    assert (up["head"].named(*SERVICE), up["worker"].named(*TRAINING)) == before


def test_a_worker_that_is_cut_off_is_shown_and_costs_no_request(up: Hosts) -> None:
    traffic = asking(up, 20)
    next(traffic)
    trainer = up["worker"].named("TrainerActor")
    up.cut_off("worker")
    cut_at = time.monotonic()
    try:
        found = wait_until(lambda: status(up["head"])["problems"], 15, "it is shown")
        assert "the trainer fails (no answer for some 8 s" in found[0]
        assert status(up["head"])["trainer"] == "away"
        print(f"shown after {time.monotonic() - cut_at:.0f} s")
        time.sleep(max(0, 30 - (time.monotonic() - cut_at)))
    finally:
        up.plug_in("worker")
    back_at = time.monotonic()
    rounds = status(up["head"])["num_rounds"]
    assert [error for round in traffic for error in round["errors"]] == []
    wait_until(lambda: status(up["head"])["trainer"] == "ok", 180, "the trainer answers again")
    print(f"back {time.monotonic() - back_at:.0f} s after it was plugged in")
    while status(up["head"])["num_rounds"] == rounds:
        assert time.monotonic() - back_at < 180, "training is back within 3 minutes"
        assert [error for round in ask(up, 1) for error in round["errors"]] == []
    print(f"trainer before and after: {trainer}, {up['worker'].named('TrainerActor')}")


def test_an_engine_that_cannot_start_is_one_line(up: Hosts) -> None:
    """It ends what ran: the configuration says so."""
    write_configuration(up, speculation={"k_max": 0})
    said = ray(up, "up", is_ok=False)
    assert "osd: " in said and "speculation.k_max=0" in said
    assert up["head"].named(*SERVICE), "a configuration that is refused ends nothing"


def test_what_changed_is_what_serves_after_ray_up(up: Hosts) -> None:
    write_configuration(up, speculation={"k_max": 3})
    before = up["head"].named("osd serve")
    assert "default has stopped" in ray(up, "up")
    wait_until_well(up["head"], 150)
    found = status(up["head"])
    assert found["k"] == 3 and found["version"] > 1
    assert up["head"].named("osd serve").keys().isdisjoint(before)
    assert [error for round in ask(up, 2) for error in round["errors"]] == []


def test_ray_down_leaves_no_process(up: Hosts) -> None:
    ray(up, "down")
    clock = time.monotonic()
    wait_for_end(up["head"], 20)
    wait_for_end(up["worker"], 90)
    print(f"the last process ended {time.monotonic() - clock:.0f} s after `ray down`")
