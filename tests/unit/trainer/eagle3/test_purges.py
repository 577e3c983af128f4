"""A purge is noticed between rounds and during one, and once."""

from __future__ import annotations

import pytest

from osd.errors import ReplayBufferError
from trainer.eagle3.purges import Purges


class Redis:
    """How many purges there were; None while it is away."""

    def __init__(self) -> None:
        self.num: int | None = 3
        self.num_forgotten = 0

    def count(self) -> int:
        if self.num is None:
            raise ReplayBufferError("away")
        return self.num

    def forget(self) -> None:
        self.num_forgotten += 1


@pytest.fixture
def redis() -> Redis:
    return Redis()


def test_each_purge_is_noticed_once(redis: Redis) -> None:
    purges = Purges(redis.count, redis.forget)
    purges.look()
    assert redis.num_forgotten == 0, "those of before are none of its own"
    for num in (4, 1):  # Redis came back with older data
        redis.num = num
        purges.look()
        purges.look()
    assert redis.num_forgotten == 2


def test_what_was_purged_while_redis_was_away_is_noticed_when_it_is_back(redis: Redis) -> None:
    purges = Purges(redis.count, redis.forget)
    redis.num = None
    purges.look()
    assert redis.num_forgotten == 0
    redis.num = 4
    purges.look()
    assert redis.num_forgotten == 1


def test_a_purge_during_a_round_is_noticed_when_the_round_has_ended(redis: Redis) -> None:
    purges = Purges(redis.count, redis.forget)
    with purges.around_round():
        redis.num = 4
        purges.look()
        assert redis.num_forgotten == 1
    assert redis.num_forgotten == 2, "the round went on with what it had read"
    with purges.around_round():
        pass
    assert redis.num_forgotten == 2


def test_a_round_that_fails_or_that_redis_left_alone_ends_in_forgetting_too(redis: Redis) -> None:
    purges = Purges(redis.count, redis.forget)
    with pytest.raises(ValueError), purges.around_round():
        redis.num = 4
        raise ValueError
    assert redis.num_forgotten == 1
    redis.num = None
    with purges.around_round():
        pass
    assert redis.num_forgotten == 2
