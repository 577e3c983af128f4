"""Natural traffic: separate files, a hash that follows the text, and prompts that are new.

No prompt was seen in training, and none comes twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.natural.recipe import (
    HERE,
    NATURAL,
    SOURCES,
    TINY,
    natural_hash,
    recipe_from_json,
    recipe_to_json,
)
from benchmarks.natural.text import HOME, PACKAGES, SourceFile, split, text_hash
from benchmarks.natural.traffic import MAX_CHARS, MIN_CHARS, line_windows, requests, served_windows
from osd.errors import ConfigError

LINE = "def function_{0}(argument_{0}: int) -> str:  # number {0}"
BODY = "    return argument_{0} + {0}"


def source(numbers: range) -> str:
    return "".join(f"{LINE}\n{BODY}\n\n".format(i) for i in numbers)


def write_library(root: Path) -> None:
    """Three files for each class, of different sizes."""
    for index, patterns in enumerate(PACKAGES.values()):
        folder = patterns[0].split("/")[0] if "/" in patterns[0] else ""
        names = (
            [f"{folder}/{i}.py" for i in range(3)]
            if folder
            else [p.replace("*", "_") for p in patterns[:3]]
        )
        for i, name in enumerate(names):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            first = 1000 * index + 100 * i
            (root / name).write_text(source(range(first, first + 60 - 10 * i)))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_both_learnt_and_served(package: str) -> None:
    parts = split(package)
    learnt, served = {f.name for f in parts.train}, {f.name for f in parts.serve}
    assert learnt and served
    assert not learnt & served
    assert not {f.text for f in parts.train} & {f.text for f in parts.serve}
    share = sum(len(f.text) for f in parts.serve) / sum(
        len(f.text) for f in parts.train + parts.serve
    )
    assert 0.15 < share < 0.5


def test_classes_share_no_file() -> None:
    names = [f.name for p in PACKAGES for part in (split(p).train, split(p).serve) for f in part]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_prompts_stand_in_served_files_and_in_no_training_file_of_any_class(package: str) -> None:
    learnt = "\0".join(_normal(f.text) for p in PACKAGES for f in split(p).train)
    served = "\0".join(_normal(f.text) for f in split(package).serve)
    for request in requests(package, 300, seed=7):
        assert request.domain == package
        assert request.answer == ""
        assert request.prompt in served
        assert request.prompt not in learnt
        assert MIN_CHARS <= len(request.prompt) <= MAX_CHARS


@pytest.mark.parametrize("package", PACKAGES)
def test_no_prompt_comes_twice(package: str) -> None:
    prompts = [r.prompt for r in requests(package, 3000, seed=1)]
    assert len(set(prompts)) == len(prompts)


def test_the_order_follows_the_seed_and_goes_on_where_it_was() -> None:
    first = requests(HOME, 20, seed=1)
    assert requests(HOME, 20, seed=1) == first
    assert requests(HOME, 5, seed=1, start=15) == first[15:]
    assert requests(HOME, 20, seed=2) != first


def test_asking_for_what_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"'pascal': must be one of email, "):
        requests("pascal", 1, seed=0)
    with pytest.raises(ValueError, match=r"email has \d+ prompts, 1000001 were asked for"):
        requests("email", 1, seed=0, start=1_000_000)


def test_windows_are_whole_lines_of_the_right_length() -> None:
    text = source(range(30))
    starts = list(line_windows(text))
    assert len(starts) > 40
    lines = text.splitlines()
    for windows in starts:
        for window in windows:
            assert MIN_CHARS <= len(window) <= MAX_CHARS
            assert window == window.rstrip()
            assert set(window.splitlines()) <= set(lines)


def test_a_window_that_was_learnt_or_served_before_is_left_out() -> None:
    text = source(range(10))
    whole = served_windows([SourceFile("a", text)], [])
    assert served_windows([SourceFile("a", text)], [SourceFile("b", f"x = 1\n{text}")]) == []
    assert served_windows([SourceFile("a", text), SourceFile("c", text)], []) == whole
    half = served_windows([SourceFile("a", text)], [SourceFile("b", source(range(5)))])
    assert 0 < sum(map(len, half)) < sum(map(len, whole))


def test_hash_follows_text_and_names(tmp_path: Path) -> None:
    write_library(tmp_path)
    before, recipe_before = text_hash(tmp_path), natural_hash(root=tmp_path)
    assert text_hash(tmp_path) == before
    assert (len(before), len(recipe_before)) == (16, 16)
    file = tmp_path / "email" / "2.py"
    file.write_text(file.read_text() + "x = 1\n")
    assert text_hash(tmp_path) != before
    assert natural_hash(root=tmp_path) != recipe_before
    file.write_text(file.read_text().removesuffix("x = 1\n"))
    assert text_hash(tmp_path) == before
    file.rename(tmp_path / "email" / "renamed.py")
    assert text_hash(tmp_path) != before


def test_hash_follows_the_recipe(tmp_path: Path) -> None:
    write_library(tmp_path)
    more = replace(NATURAL, target_steps=NATURAL.target_steps + 1)
    assert natural_hash(more, tmp_path) != natural_hash(NATURAL, tmp_path)
    assert recipe_from_json(recipe_to_json(more)) == more


def test_hash_covers_every_file_that_shapes_the_models() -> None:
    own = {path for path in HERE.glob("*.py") if path.stem not in ("__init__", "models", "report")}
    assert own | {TINY / "tokenizer.py", TINY / "training.py", TINY / "muon.py"} == set(SOURCES)


def test_a_python_without_source_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 0 source files for 'email'") as caught:
        text_hash(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def _normal(text: str) -> str:
    """Lines as prompts have them: without blanks at their ends."""
    return "\n".join(line.rstrip() for line in text.splitlines())
