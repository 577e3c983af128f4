"""What attached engines are told, and that it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.config.schema import Config
from osd.control.engine_terms import TermsKeeper
from osd.errors import ConfigError
from osd.records import STEPS
from osd.releases.store import ReleaseStore
from tests.unit.osd.control.test_controller import TARGET, MemoryRegistry
from tests.unit.osd.releases.test_store import make_model


class Kept:
    def __init__(self, directory: Path, **serving: Any) -> None:
        self.registry = MemoryRegistry()
        self.store = ReleaseStore(directory / "releases")
        self.first = self.store.publish(make_model(directory / "m"), parent=0, target_id=TARGET)
        self._config = Config.model_validate({"serving": {"engines": "attached"} | serving})
        self.keeper = self.again()

    def again(self) -> TermsKeeper:
        """As after a restart."""
        return TermsKeeper(self._config, self.registry, self.store, TARGET, "http://here", "t0k3n")

    @property
    def steps(self) -> tuple[str, ...]:
        assert self.registry.told is not None
        return self.registry.told.steps


async def test_engines_are_told_what_the_configuration_says(tmp_path: Path) -> None:
    kept = Kept(tmp_path, steps=["observe", "capture"])
    await kept.keeper.restore()
    told = kept.registry.told
    assert told is not None and told.target_id == TARGET and told.first == kept.first
    assert kept.steps == ("observe", "capture")
    assert (told.drafts_url, told.drafts_token) == ("http://here", "t0k3n")
    buffer = Config().buffer
    assert told.buffer == {"max_traces": buffer.max_traces, "max_domains": buffer.max_domains}
    assert told.capture["top_k"] == Config().capture.top_k


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
async def test_engines_are_told_how_drafts_are_judged(tmp_path: Path, how: str) -> None:
    kept = Kept(tmp_path)
    speculation = kept._config.speculation.model_copy(update={"draft_sample_method": how})
    kept._config = kept._config.model_copy(update={"speculation": speculation})
    assert kept.again().terms().draft_sample_method == how


async def test_all_is_on_unless_told_otherwise(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.keeper.restore()
    assert kept.steps == STEPS


async def test_what_redis_lost_is_told_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.keeper.restore()
    told, kept.registry.told = kept.registry.told, None
    await kept.keeper.restore()
    assert kept.registry.told == told


async def test_a_switch_outlives_a_restart(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.keeper.set_steps(("observe",))
    assert kept.steps == ("observe",)
    kept.registry.told = None
    await kept.again().restore()
    assert kept.steps == ("observe",)
    await kept.keeper.set_steps(())
    assert kept.steps == ()


async def test_an_unknown_step_changes_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.keeper.restore()
    with pytest.raises(ConfigError, match="^sing: no step; there are observe, capture, swap"):
        await kept.keeper.set_steps(("observe", "sing"))
    assert kept.steps == STEPS and kept.store.steps() is None


async def test_a_services_own_engine_has_no_steps(tmp_path: Path) -> None:
    kept = Kept(tmp_path, engines="own")
    await kept.keeper.restore()
    assert kept.registry.told is None
    with pytest.raises(ConfigError, match=r"^serving\.engines=own: there is nothing to switch"):
        await kept.keeper.set_steps(("observe",))
