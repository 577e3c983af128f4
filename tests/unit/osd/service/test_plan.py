"""What a plan refuses before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from osd.config import reading
from osd.errors import ConfigError
from osd.service import plan
from osd.service.fleet import haproxy
from osd.service.plan import (
    check_attached,
    check_front_door,
    check_remote_parts,
    with_free_ports,
    without_speculation,
)
from tests.support.headed import build_headed

ELSEWHERE = ["ray.trainer_resource=train", "ray.address=head:6380"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["ray.trainer_resource=train", "trainer.enabled=false"],
        [*ELSEWHERE, "buffer.redis_url=redis://10.0.0.2:6379"],
        [*ELSEWHERE, "buffer.host=10.0.0.2"],
        [*ELSEWHERE, "buffer.redis_url=redis://me:secret@localhost.example:6379/0"],
    ],
)
def test_a_trainer_that_can_reach_its_buffer_is_fine(overrides: list[str]) -> None:
    check_remote_parts(reading.load(overrides=overrides, environ={}).config)


SAMPLED = "speculation.draft_sample_method=probabilistic"


def test_a_head_over_several_ranks_that_is_drawn_from_does_not_start(tmp_path: Path) -> None:
    pair = build_headed(tmp_path)
    own = [f"serving.target={pair.target}", f"serving.draft={pair.draft}"]
    ranks = "serving.vllm.tensor_parallel_size=2"
    with pytest.raises(ConfigError) as caught:
        plan.check(reading.load(overrides=[*own, ranks, SAMPLED], environ={}).config)
    assert (
        str(caught.value)
        == f"{SAMPLED}: was not run with an EAGLE-3 head over several ranks; use greedy"
    )
    for overrides in ([*own, ranks], [*own, SAMPLED]):
        plan.check(reading.load(overrides=overrides, environ={}).config)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["ray.trainer_resource=train"], "a private Ray has none; set ray.address"),
        (ELSEWHERE, "cannot reach buffer.host=127.0.0.1 of the private Valkey; set it to an"),
        ([*ELSEWHERE, "buffer.host=localhost"], "cannot reach buffer.host=localhost"),
        (
            [*ELSEWHERE, "buffer.redis_url=redis://me:secret@127.0.0.1:6379/0"],
            "buffer.redis_url=redis://127.0.0.1:6379/0: ray.trainer_resource=train puts",
        ),
        (["ray.replica_resource=gpu"], "puts the engines on another machine, and a private Ray"),
        (["ray.replica_resource=gpu", "ray.address=head:6380"], "cannot reach buffer.host=127"),
        ([*ELSEWHERE, "buffer.redis_url=redis://localhost"], "name it by an address that both"),
        ([*ELSEWHERE, "buffer.redis_url=redis://[::1]:6379"], "name it by an address that both"),
        ([*ELSEWHERE, "buffer.redis_url=unix:///run/redis.sock"], "by an address that both reach"),
    ],
)
def test_a_trainer_on_another_machine_needs_a_redis_that_both_reach(
    overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_remote_parts(reading.load(overrides=overrides, environ={}).config)
    assert says in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ("serving.num_gpus=1 trainer.num_gpus=0.5", {"": 1.5}),
        ("serving.num_gpus=1 trainer.num_gpus=0.5 trainer.enabled=false", {"": 1.0}),
        ("serving.num_gpus=1 trainer.num_gpus=2 ray.trainer_resource=t", {"": 1.0, "t": 2.0}),
        ("serving.num_gpus=1 ray.replica_resource=s", {"": 0.0, "s": 1.0}),
        ("serving.num_gpus=1 ray.replica_resource=s serving.replicas=3", {"": 0.0, "s": 1.0}),
        ("serving.num_gpus=1 serving.replicas=3 trainer.num_gpus=1", {"": 4.0}),
        (
            "serving.num_gpus=2 trainer.num_gpus=1 ray.replica_resource=s ray.trainer_resource=s",
            {"": 0.0, "s": 2.0},
        ),
        ("serving.engines=attached serving.num_gpus=1 trainer.num_gpus=1", {"": 1.0}),
    ],
)
def test_gpus_are_asked_of_the_machines_that_parts_run_on(
    overrides: str, asked: dict[str, float]
) -> None:
    config = reading.load(overrides=overrides.split(), environ={}).config
    assert plan.asked_of_machines(config) == asked


def test_engines_of_others_are_not_placed_by_us() -> None:
    overrides = ["serving.engines=attached", "ray.replica_resource=gpu"]
    check_remote_parts(reading.load(overrides=overrides, environ={}).config)


def test_several_replicas_need_haproxy_and_engines_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = reading.load(overrides=["serving.replicas=2"], environ={}).config
    check_front_door(several)
    attached = reading.load(
        overrides=["serving.replicas=2", "serving.engines=attached"], environ={}
    ).config
    with pytest.raises(ConfigError, match="serving.replicas.max=2: attached engines"):
        check_front_door(attached)

    def missing() -> None:
        raise ConfigError("not found")

    monkeypatch.setattr(plan, "find_program", missing)
    with pytest.raises(ConfigError, match="not found"):
        check_front_door(several)
    check_front_door(reading.load(overrides=[], environ={}).config)
    assert haproxy.find_program().is_file()


def test_an_engine_for_comparison_stands_alone() -> None:
    several = reading.load(overrides=["serving.replicas=2"], environ={}).config
    assert without_speculation(several).serving.replicas.max == 1


@pytest.mark.parametrize("key", ["ssl_certfile", "ssl-keyfile"])
def test_behind_a_front_door_there_is_no_tls(key: str) -> None:
    given = [f"serving.vllm.{key}=/some/file"]
    check_front_door(reading.load(overrides=given, environ={}).config)
    for behind in ("serving.replicas=2", "ray.replica_resource=gpu"):
        with pytest.raises(ConfigError, match=r"plain HTTP.*end TLS before the service port"):
            check_front_door(reading.load(overrides=[behind, *given], environ={}).config)


ATTACHED = ["serving.engines=attached"]


@pytest.mark.parametrize("more", [["buffer.port=6400"], ["buffer.redis_url=redis://10.0.0.2"]])
def test_engines_of_others_find_redis_again(more: list[str]) -> None:
    check_attached(reading.load(overrides=[*ATTACHED, *more], environ={}).config)
    check_attached(reading.load(overrides=[], environ={}).config)


def test_engines_of_others_would_lose_a_redis_at_any_free_port() -> None:
    with pytest.raises(ConfigError, match=r"^serving\.engines=attached: .* with buffer\.port=N"):
        check_attached(reading.load(overrides=ATTACHED, environ={}).config)


def test_without_an_engine_no_service_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = [f"serving.port={port}", "control.port=0"]
        config = with_free_ports(reading.load(overrides=[*ATTACHED, *given], environ={}).config)
        assert config.control.port > 0
        with pytest.raises(ConfigError, match=r"^serving\.port="):
            with_free_ports(reading.load(overrides=given, environ={}).config)


def test_a_port_in_use_is_told_before_models_are_looked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = ["serving.target=org/far-away", f"serving.port={taken.getsockname()[1]}"]
        with pytest.raises(ConfigError, match=r"^serving\.port="):
            plan.plan(reading.load(overrides=given, environ={}).config)


@pytest.mark.parametrize(
    "given", ["speculation.mode=off", "speculation.proposers=[draft]", "speculation.mode=fixed"]
)
def test_what_attached_engines_are_not_told_is_refused(given: str) -> None:
    overrides = [*ATTACHED, "buffer.port=6400", given]
    with pytest.raises(ConfigError, match=rf"^{given.split('=')[0]}=.*: engines that are attached"):
        check_attached(reading.load(overrides=overrides, environ={}).config)
    check_attached(reading.load(overrides=[given], environ={}).config)
    given = "speculation.k_max=3"
    check_attached(reading.load(overrides=[*overrides[:2], given], environ={}).config)
