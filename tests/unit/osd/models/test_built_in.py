"""Names of built-in models: each leads to its directory in the cache, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from osd.errors import ConfigError
from osd.models import built_in
from osd.models.resolve import resolve
from osd.tiny import models as tiny
from osd.tiny.deep import head
from osd.tiny.deep import models as deep
from osd.tiny.deep import recipe as deep_recipe

PAIR, DEEP, DEEP_DRAFT = tiny.cache_name(), deep.target_cache_name(), deep.draft_cache_name()
HEAD, HEAD_WIDE = head.cache_name(), head.cost_shaped_cache_name()
WIDE, DEEP_WIDE = tiny.cost_shaped_cache_name(), deep.cost_shaped_cache_name()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("key", "name", "place"),
    [
        ("serving.target", "tiny", f"{PAIR}/target"),
        ("serving.draft", "tiny", f"{PAIR}/draft"),
        ("serving.target", "tiny-cost-shaped", WIDE),
        ("serving.target", "tiny-deep", DEEP),
        ("serving.draft", "tiny-deep", DEEP_DRAFT),
        ("serving.target", "tiny-deep-cost-shaped", DEEP_WIDE),
        ("serving.draft", "tiny-eagle3", f"{HEAD}/head"),
        ("serving.draft", "tiny-eagle3-cost-shaped", HEAD_WIDE),
    ],
)
def test_a_name_is_found_where_it_was_built(cache: Path, key: str, name: str, place: str) -> None:
    own = place.split("/")[0]
    for other in {PAIR, WIDE, DEEP, DEEP_DRAFT, DEEP_WIDE, HEAD, HEAD_WIDE} - {own}:
        (cache / other).mkdir()
    assert not built_in.is_built(name, key)
    (cache / own).mkdir()
    assert built_in.is_built(name, key)
    assert resolve(name, key) == cache / place


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("serving.target", name) for name in built_in.TARGETS),
        *(("serving.draft", name) for name in built_in.DRAFTS),
    ],
)
def test_what_another_recipe_built_does_not_count(cache: Path, key: str, name: str) -> None:
    for other in ("tiny-0", "wide-0-768x8x3072", "deep-target-0", "deep-wide-0-768x8x3072"):
        (cache / other).mkdir()
    assert not built_in.is_built(name, key)


@pytest.mark.parametrize("name", ["tiny-cost-shaped", "tiny-deep-cost-shaped"])
def test_a_target_is_no_draft(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^serving.draft={name}: is a target, .*tiny-deep or"):
        resolve(name, "serving.draft")
    with pytest.raises(ConfigError, match=f"^serving.draft={name}: is a target, "):
        built_in.is_built(name, "serving.draft")


@pytest.mark.parametrize("name", ["tiny-eagle3", "tiny-eagle3-cost-shaped"])
def test_a_head_is_no_target(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^serving.target={name}: is a draft, .*tiny-deep or"):
        resolve(name, "serving.target")


def test_each_recipe_has_a_place_of_its_own() -> None:
    here = Path(deep_recipe.__file__).parent
    assert set(deep_recipe.SOURCES) <= {file.name for file in here.glob("*.py")}
    assert len({PAIR, WIDE, DEEP, DEEP_DRAFT, DEEP_WIDE, HEAD, HEAD_WIDE}) == 7
