"""`ray up` with an engine on each host, behind the front door at the head. The tests are one story,
in this order."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from osd.exchange.transfer import content_id
from osd.releases.store import ReleaseStore
from tests.cluster.commands import OSD, WholeAnswers, ask, osd, ray, status, wait_for_end
from tests.cluster.conftest import write_configuration
from tests.cluster.hosts import Hosts
from tests.support.paths import ROOT
from tests.support.services import wait_until

pytestmark = pytest.mark.timeout(900)

DATA = "osd-two"
"""The data directory, in the home of each host."""


@pytest.fixture(scope="module")
def up(hosts: Hosts) -> Iterator[Hosts]:
    write_configuration(
        hosts,
        data_dir=f"~/{DATA}",
        serving={"replicas": 2},
        ray={"replica_resource": "serve"},
        gate={"canary_seconds": 5},
    )
    said = ray(hosts, "up")
    assert "serving: http://0.0.0.0:8000/v1" in said
    clock = time.monotonic()
    wait_until(lambda: len(engines(hosts)) == 2, 240, "both serve")
    print(f"both serve {time.monotonic() - clock:.0f} s after `ray up`")
    yield hosts


def engines(hosts: Hosts) -> dict[str, dict[str, Any]]:
    """Host -> the replica on it, where its URL says that it is."""
    found = status(hosts["head"])["replicas"]
    names = {hosts[name].address: name for name in ("head", "worker")}
    return {names[each["url"].split("/")[2].split(":")[0]]: each for each in found}


def num_answered(hosts: Hosts, name: str) -> int:
    """How many requests the engine on a host has answered, as vLLM counts them."""
    said = hosts["laptop"].run(f"curl -s {engines(hosts)[name]['url']}/metrics").stdout
    lines = [x for x in said.splitlines() if x.startswith("vllm:request_success_total{")]
    return round(sum(float(line.split()[-1]) for line in lines))


def asked_of_control(hosts: Hosts, what: str) -> Any:
    """As `osd` commands ask on the head, but sooner."""
    return json.loads(hosts["head"].run(f"curl -s http://127.0.0.1:8001/osd/{what}").stdout)


def store(hosts: Hosts) -> ReleaseStore:
    return ReleaseStore(hosts["head"].home / DATA / "releases")


def ids_of_releases(hosts: Hosts) -> dict[str, int]:
    """What a release is called where it was fetched -> its version."""
    return {content_id(release.files): release.version for release in store(hosts).list()}


def num_fetched(hosts: Hosts, name: str) -> Counter[int]:
    """Version -> how often the parts on a host fetched it, as their logs say."""
    ids, found = ids_of_releases(hosts), Counter[int]()
    for log in (hosts[name].home / DATA / "logs").glob("*.log"):
        names = re.findall(r"/fetched/(\w+) in", log.read_text(errors="replace"))
        found.update(ids[name] for name in names if name in ids)
    return found


def versions(hosts: Hosts) -> set[int]:
    return {each["version"] for each in engines(hosts).values()}


def test_what_is_running_passes_its_own_check(up: Hosts) -> None:
    said = up["laptop"].run(f"cd {ROOT} && {OSD} cluster check ~/cluster.yaml")
    assert said.returncode == 0 and "equal on all" in said.stdout, said.stdout


@pytest.fixture(scope="module")
def first(up: Hosts) -> dict[str, Any]:
    """The first requests, and what each engine answered of them. The draft knows nothing yet."""
    before = {name: num_answered(up, name) for name in ("head", "worker")}
    (found,) = ask(up, 1)
    return found | {name: num_answered(up, name) - num for name, num in before.items()}


def test_both_answer_alike_behind_the_front_door(up: Hosts, first: dict[str, Any]) -> None:
    print(f"of 24 requests: {first['head']} at the head, {first['worker']} at the worker")
    assert first["errors"] == []
    assert first["head"] + first["worker"] == 24 and min(first["head"], first["worker"]) > 0
    for each in engines(up).values():
        (alone,) = ask(up, 1, each["url"])
        assert (alone["errors"], alone["digest"]) == ([], first["digest"])


def test_a_draft_learnt_on_the_worker_serves_on_both(up: Hosts, first: dict[str, Any]) -> None:
    wanted = first["alpha"] + 0.3
    at_each: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + 240
    while not at_each or min(each["alpha"] for each in at_each.values()) < wanted:
        assert time.monotonic() < deadline, "it is not learnt, or not passed on"
        (found,) = ask(up, 1)
        assert (found["errors"], found["digest"]) == ([], first["digest"]), "whatever draft serves"
        if len(versions(up)) == 1 and found["alpha"] > wanted:
            at_each = {name: ask(up, 1, each["url"])[0] for name, each in engines(up).items()}
    alphas = ", ".join(f"{each['alpha']:.2f} at the {name}" for name, each in at_each.items())
    print(f"α {first['alpha']:.2f}, then {alphas}")
    assert {each["digest"] for each in at_each.values()} == {first["digest"]}
    told = {event["kind"] for event in asked_of_control(up, "events")}
    assert "rolled_out" in told, "a new draft serves on one host first"


def test_each_release_comes_to_a_host_once(up: Hosts) -> None:
    osd(up["head"], "pause")
    newest = status(up["head"])["version"]
    wait_until(lambda: versions(up) == {newest}, 90, "the newest serves on both")
    fetched = num_fetched(up, "worker")
    print(f"fetched by the worker's trainer and engine: {dict(fetched)}")
    assert fetched[newest] == 1 and set(fetched.values()) == {1}
    assert num_fetched(up, "head") == Counter()
    for name in ("head", "worker"):
        assert (up[name].home / DATA / "releases").exists() is (name == "head")
        assert (up[name].home / DATA / "fetched").exists() is (name == "worker")


def test_an_engine_killed_on_the_worker_fails_no_request(up: Hosts, first: dict[str, Any]) -> None:
    """None of which a word was answered. It comes back with the newest draft."""
    newest = status(up["head"])["version"]
    killed = engines(up)["worker"]
    with WholeAnswers(up) as traffic:
        wait_until(lambda: engines(up)["worker"]["num_running"] > 1, 30, "it has work")
        up["worker"].run(f"kill -KILL {killed['pid']}")
        clock = time.monotonic()
        wait_until(lambda: is_shown_as_lost(up, killed), 15, "it is shown")
        print(f"killed; shown after {time.monotonic() - clock:.1f} s")
        wait_until(lambda: is_back(up, killed), 240, "it is back, and is asked")
        print(f"asked again after {time.monotonic() - clock:.0f} s")
    assert traffic.errors == [] and len(traffic.digests) == 1
    wait_until(lambda: losses(up)[:1] == ["replica_back"], 10, "its return is told")
    assert losses(up) == ["replica_back", "replica_lost"], "each once"
    assert engines(up)["worker"]["version"] == newest
    assert num_fetched(up, "worker")[newest] == 1, "it was on the host already"
    (alone,) = ask(up, 1, engines(up)["worker"]["url"])
    assert (alone["errors"], alone["digest"]) == ([], first["digest"])
    assert alone["alpha"] > first["alpha"] + 0.3


def is_shown_as_lost(hosts: Hosts, lost: dict[str, Any]) -> bool:
    said = asked_of_control(hosts, "status")["problems"]
    return any(problem.startswith(f"{lost['replica']} was lost ") for problem in said)


def losses(hosts: Hosts) -> list[str]:
    """Newest first."""
    kinds = [event["kind"] for event in asked_of_control(hosts, "events")]
    return [kind for kind in kinds if kind in ("replica_lost", "replica_back")]


def is_back(hosts: Hosts, killed: dict[str, Any]) -> bool:
    found = engines(hosts).get("worker", {})
    return found.get("pid", killed["pid"]) != killed["pid"] and found["num_running"] > 0


def test_a_host_that_is_cut_off_fails_no_request(up: Hosts, first: dict[str, Any]) -> None:
    """Requests that it had begun to answer are answered by the other. It comes back by itself."""
    lost, told = engines(up)["worker"], losses(up)
    with WholeAnswers(up) as traffic:
        wait_until(lambda: engines(up)["worker"]["num_running"] > 1, 30, "it has work")
        up.cut_off("worker")
        clock = time.monotonic()
        try:
            wait_until(lambda: is_shown_as_lost(up, lost), 15, "it is shown")
            print(f"cut off; shown after {time.monotonic() - clock:.1f} s")
            time.sleep(max(0, 40 - (time.monotonic() - clock)))
        finally:
            up.plug_in("worker")
        clock = time.monotonic()
    seconds = sorted(took for each in traffic.rounds for took in each["seconds"])
    print(f"requests took {seconds[len(seconds) // 2]:.1f} s, the slowest {seconds[-8:]}")
    assert 10 < seconds[-1] < 40, "some waited for the host's answer, and were asked elsewhere"
    assert traffic.errors == [] and len(traffic.digests) == 1
    alone = wait_until(lambda: whole_round(up, "worker"), 400, "it serves again")
    print(f"it serves again {time.monotonic() - clock:.0f} s after it was plugged in")
    assert alone["digest"] == first["digest"]
    wait_until(lambda: losses(up)[:1] == ["replica_back"], 30, "its return is told")
    num_told = len(losses(up)) - len(told)
    assert losses(up)[:num_told] == ["replica_back", "replica_lost"] * (num_told // 2)
    wait_until(lambda: versions(up) == {status(up["head"])["version"]}, 90, "it has the newest")


def whole_round(hosts: Hosts, name: str) -> dict[str, Any]:
    """A round of answers by the engine on a host; {} where one fails. Ray may have given the host
    up, and start the engine again."""
    if (found := engines(hosts).get(name)) is None:
        return {}
    (alone,) = ask(hosts, 1, found["url"])
    return {} if alone["errors"] else alone


def test_ray_down_leaves_no_process(up: Hosts) -> None:
    ray(up, "down")
    clock = time.monotonic()
    wait_for_end(up["head"], 60)
    print(f"the head's last process ended {time.monotonic() - clock:.0f} s after `ray down`")
    wait_for_end(up["worker"], 90)
    print(f"the last process ended {time.monotonic() - clock:.0f} s after `ray down`")
