"""A family's models fit each other, at the cost of a far larger model too. Nothing is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traffic.family import FAMILIES
from osd.tiny.deep import head
from osd.tiny.deep import models as deep

TARGET, DRAFT, HEAD = deep.target_cache_name(), deep.draft_cache_name(), head.cache_name()
WIDE, HEAD_WIDE = deep.cost_shaped_cache_name(), head.cost_shaped_cache_name()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if all had been built."""
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path))
    for name in (TARGET, DRAFT, WIDE, HEAD_WIDE, f"{HEAD}/head"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "own", "costly"),
    [
        ("tiny-deep", (TARGET, DRAFT), (WIDE, DRAFT)),
        ("tiny-deep-head", (TARGET, f"{HEAD}/head"), (WIDE, HEAD_WIDE)),
    ],
)
def test_a_head_is_widened_with_its_target_and_a_draft_model_is_not(
    cache: Path, name: str, own: tuple[str, str], costly: tuple[str, str]
) -> None:
    family = FAMILIES[name]
    assert family.models() == tuple(cache / one for one in own)
    assert family.costly_models() == tuple(cache / one for one in costly)


def test_a_head_needs_no_draft_model(cache: Path) -> None:
    (cache / DRAFT).rmdir()
    for get in (FAMILIES["tiny-deep-head"].models, FAMILIES["tiny-deep-head"].costly_models):
        assert all(path.is_dir() for path in get())
    assert not (cache / DRAFT).exists()
