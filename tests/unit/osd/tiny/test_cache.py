"""The cache of built directories: built once, never half, with clear errors."""

from __future__ import annotations

import fcntl
import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from osd.common.files import cache_root
from osd.errors import ConfigError
from osd.tiny.cache import build_once
from osd.tiny.recipe import SOURCES, recipe_hash


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))


def test_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("OSD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "osd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "osd"


def test_second_call_finds_what_the_first_built() -> None:
    calls: list[Path] = []

    def build(directory: Path) -> None:
        calls.append(directory)
        (directory / "weights").write_text("w")

    first = build_once("model", build)
    assert build_once("model", build) == first
    assert (first / "weights").read_text() == "w"
    assert len(calls) == 1
    assert calls[0] != first


def test_a_failed_build_leaves_nothing_that_counts() -> None:
    def fail(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        build_once("model", fail)
    assert not (cache_root() / "model").exists()
    assert not [path for path in cache_root().iterdir() if path.is_dir()]
    whole = build_once(
        "model", lambda directory: (directory / "weights").write_text("whole") and None
    )
    assert (whole / "weights").read_text() == "whole"


def test_processes_starting_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_build_and_log, args=(str(log),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert log.read_text() == "built\n"


def test_whoever_waits_for_another_process_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cache_root().mkdir(parents=True)
    with (cache_root() / ".model.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=build_once, args=("model", lambda directory: None))
        waiting.start()
        while not caplog.messages:
            time.sleep(0.01)
        assert waiting.is_alive() and caplog.messages == [
            "another process builds model: waiting for it"
        ]
    waiting.join(60)
    assert (cache_root() / "model").is_dir()


def test_unusable_cache_directory_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("OSD_CACHE_DIR", str(file / "cache"))
    with pytest.raises(ConfigError, match=r"file/cache.*OSD_CACHE_DIR") as caught:
        build_once("model", lambda directory: None)
    assert "\n" not in str(caught.value)


def test_recipe_hash_covers_every_file_that_shapes_the_models() -> None:
    import osd.tiny

    assert len(recipe_hash()) == 16
    files = {path.name for path in Path(osd.tiny.__path__[0]).glob("*.py")}
    assert {name for name in files if name.startswith("text_")} | {
        "traffic.py",
        "recipe.py",
    } <= set(SOURCES)
    assert set(SOURCES) <= files


def _build_and_log(log: str) -> None:
    import time

    def build(directory: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.5)
        (directory / "weights").write_text("w")

    assert (build_once("model", build) / "weights").read_text() == "w"
