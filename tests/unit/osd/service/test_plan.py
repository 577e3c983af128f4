"""What a plan refuses before anything starts."""

from __future__ import annotations

import pytest

from osd.config import reading
from osd.errors import ConfigError
from osd.service.plan import check_remote_trainer

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
    check_remote_trainer(reading.load(overrides=overrides, environ={}).config)


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
        ([*ELSEWHERE, "buffer.redis_url=redis://localhost"], "name it by an address that both"),
        ([*ELSEWHERE, "buffer.redis_url=redis://[::1]:6379"], "name it by an address that both"),
        ([*ELSEWHERE, "buffer.redis_url=unix:///run/redis.sock"], "by an address that both reach"),
    ],
)
def test_a_trainer_on_another_machine_needs_a_redis_that_both_reach(
    overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_remote_trainer(reading.load(overrides=overrides, environ={}).config)
    assert says in str(caught.value) and "secret" not in str(caught.value)
