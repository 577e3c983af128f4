"""What keeps a service from starting is said before anything waits for it."""

from __future__ import annotations

import pytest

from osd import config_reading
from osd.errors import ConfigError
from osd.launch import check_gpus


@pytest.mark.parametrize(
    ("overrides", "num", "says"),
    [
        ([], 0, ""),
        (["serving.num_gpus=1"], 1, ""),
        (["serving.num_gpus=0.7", "trainer.num_gpus=0.3"], 1, ""),
        (["serving.num_gpus=1"], 0, "serving.num_gpus=1: Ray finds 0 GPUs"),
        (["serving.num_gpus=1", "trainer.num_gpus=1"], 1, "serving.num_gpus=1, trainer.num_gpus=1: Ray finds 1 GPUs"),
        (["trainer.num_gpus=1"], 0, "trainer.num_gpus=1: Ray finds 0 GPUs"),
        (["trainer.num_gpus=1", "trainer.enabled=false"], 0, ""),
    ],
)
def test_more_gpus_than_there_are_are_refused(overrides: list[str], num: int, says: str) -> None:
    config = config_reading.load(overrides=overrides, environ={}).config
    if not says:
        return check_gpus(config, num)
    with pytest.raises(ConfigError, match=says):
        check_gpus(config, num)
