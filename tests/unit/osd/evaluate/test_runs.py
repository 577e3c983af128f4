"""Runs are kept whole, found again, and never mixed with those of another configuration."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from osd.errors import ConfigError, OSDError
from osd.evaluate.plan import Load, Plan
from osd.evaluate.runs import Directory, write, writing
from tests.support.evaluations import REQUESTS, run_of, served

PLAN = Plan(methods=("none", "draft"), lengths=(2,), loads=(Load(streams=2),), num_repeats=2)
RUNS = list(PLAN.runs("draft"))
SETTINGS = {"target": "abc", "max_tokens": 8}


def opened(path: Path, **changes: object) -> Directory:
    directory = Directory(path / "out")
    directory.open(SETTINGS | changes, REQUESTS)
    return directory


def test_a_run_that_has_its_file_is_not_missing(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    assert directory.missing(RUNS) == RUNS
    run = run_of("none", 0, [served(0, [0, 0], 0)])
    write(directory.file(RUNS[0]), run)
    again = opened(tmp_path)
    assert again.missing(RUNS) == RUNS[1:]
    assert again.read(RUNS[0]) == run
    assert again.requests() == REQUESTS


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, max_tokens=16)
    assert str(error.value) == (
        f"--out: {tmp_path / 'out'} holds runs with another max_tokens (8, not 16); give another "
        "directory"
    )
    opened(tmp_path)  # which is still there


def test_a_file_that_is_no_run_or_another_one_is_named(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    write(directory.file(RUNS[1]), run_of("none", 0, []))
    with pytest.raises(ConfigError, match="holds another run than its name says; remove it"):
        directory.read(RUNS[1])
    directory.file(RUNS[0]).write_text('{"engine": "draft"')
    with pytest.raises(ConfigError, match=r"none_batch-2_t0_0.json: is not a run .*remove it"):
        directory.read(RUNS[0])


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match=r"--out: .*out"):
        opened(tmp_path)


def test_a_file_elsewhere_is_not_said_to_be_of_out(tmp_path: Path) -> None:
    def refused(name: Path) -> str:
        with pytest.raises(OSDError) as found, writing(tmp_path / "out" / "draft"):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return str(found.value)

    draft = tmp_path / "models" / "model.safetensors"
    assert refused(draft).startswith(f"{draft}: Permission denied")
    assert refused(tmp_path / "out" / "draft.new").startswith(f"--out: {tmp_path}/out/draft.new: ")


def test_a_run_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(
        OSDError, match=r"^--out: .*/runs: .*; give a directory that can be"
    ) as error:
        write(tmp_path / "runs" / "none.json", run_of("none", 0, []))
    assert "\n" not in str(error.value)
