"""What the trainer's process is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osd.config.schema import Config
from osd.service import actors
from osd.service.actors import TrainerActor


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
def test_drafts_are_judged_as_engines_draw_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    told: dict[str, Any] = {}
    for name in ("begin_log", "give_way", "teacher_here"):
        monkeypatch.setattr(actors, name, lambda *_, **__: None)

    def trainer(*_: Any, **given: Any) -> Any:
        told.update(given)
        return SimpleNamespace(forget=lambda *_: None)

    monkeypatch.setitem(sys.modules, "trainer.loop", SimpleNamespace(Trainer=trainer))
    config = Config.model_validate(
        {"data_dir": str(tmp_path), "speculation": {"draft_sample_method": how}}
    )
    TrainerActor(
        config, redis_url="redis://127.0.0.1:1", target_id="t", log_dir=str(tmp_path), is_head=False
    )
    assert told["is_sampled"] is (how == "probabilistic")
