"""Names of models that are neither a directory nor a hub's."""

from __future__ import annotations

from pathlib import Path

import pytest

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.evaluate import models
from osd.models.resolve import resolve
from osd.service import plan
from tests.support.commands import run_osd


@pytest.mark.parametrize("name", ["~nobody-here/model", "./x" * 3000, f"/{'x' * 300}"])
def test_what_no_file_system_has_is_no_directory(name: str) -> None:
    """A home that there is not, as a shell leaves it, and names that are too long."""
    with pytest.raises(ConfigError, match="^serving.target=.*: no such directory; give a model"):
        resolve(name, "serving.target")


@pytest.mark.parametrize("draft", ["./none", "tiny-cost-shaped"])
def test_a_name_of_no_draft_is_told_before_a_target_is_built(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    config = Config.model_validate({"serving": {"target": "tiny", "draft": draft}})
    with pytest.raises(ConfigError, match=f"^serving.draft={draft}: "):
        plan.check(config)
    with pytest.raises(ConfigError, match=f"^serving.draft={draft}: "):
        models.find(config, "")
    with pytest.raises(ConfigError, match=f"^--head={draft}: "):
        models.find(Config.model_validate({"serving": {"target": "tiny"}}), draft)
    assert not (tmp_path / "cache").exists()


def test_a_name_of_no_target_is_told_before_a_draft_is_built(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n" * 64)
    environ = {"OSD_CACHE_DIR": str(tmp_path / "cache")}
    command = ["distil", "./none", "--draft", "tiny", "--prompts", "p.txt", "--out", "new"]
    done = run_osd(*command, environ=environ, cwd=tmp_path)
    assert done.stderr.startswith("osd: serving.target=./none: no such directory"), done.stderr
    assert not (tmp_path / "cache").exists()
