"""`configs/Containerfile`: it is not built here, but each of its steps is one that is tested."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FILE = ROOT / "configs/Containerfile"
PACKAGE_MANAGER = re.compile(
    r"apt-get update && apt-get install -y --no-install-recommends [a-z0-9 -]+"
    r" && rm -rf /var/lib/apt/lists/[*]"
)


def steps(kind: str) -> list[str]:
    """What stands behind a word like RUN, in order."""
    lines = FILE.read_text().replace("\\\n", " ").splitlines()
    return [line.split(None, 1)[1] for line in lines if line.startswith(f"{kind} ")]


def variables() -> dict[str, str]:
    return dict(part.split("=", 1) for step in steps("ENV") for part in step.split())


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with what the steps copy, and nothing else."""
    folder = tmp_path / "image"
    for step in steps("COPY"):
        *sources, target = step.split()
        for source in sources:
            into = folder / target / Path(source).name if target == "./" else folder / target
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / source, into)
    return folder


def test_what_is_run_is_ours_or_the_package_manager() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], capture_output=True, text=True, cwd=ROOT)
    modes = {line.split("\t")[1]: line[:6] for line in listed.stdout.splitlines()}
    packages, *ours = steps("RUN")
    assert PACKAGE_MANAGER.fullmatch(packages)
    assert ours == ["scripts/setup.sh"] and modes["scripts/setup.sh"] == "100755"
    assert "It was not built" in FILE.read_text()


def test_what_is_copied_is_in_the_checkout() -> None:
    for step in steps("COPY"):
        *sources, _ = step.split()
        for source in sources:
            command = ["git", "ls-files", "--error-unmatch", source]
            assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0, source


def test_its_python_is_one_that_is_supported() -> None:
    (base,) = steps("FROM")
    found = re.fullmatch(r"python:3[.](\d+)-slim", base)
    assert found and 11 <= int(found[1]) < 14


def test_the_command_is_found(image: Path) -> None:
    project = tomllib.loads((image / "pyproject.toml").read_text())
    assert steps("ENTRYPOINT") == ['["osd"]'] and "osd" in project["project"]["scripts"]
    assert variables()["PATH"] == f"{variables()['OSD_VENV']}/bin:$PATH"
    wanted = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert all((image / name.rstrip("*") / "__init__.py").exists() for name in wanted)


def test_the_code_that_is_copied_is_complete(image: Path) -> None:
    code = "import osd.cli, osd.service.launch, serving.replica, trainer.loop, buffers; print(osd)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=image,
        env={**os.environ, "PYTHONPATH": str(image)},
    )
    assert done.returncode == 0, done.stderr
    assert str(image) in done.stdout


def test_the_setup_runs_with_what_is_copied(image: Path, tmp_path: Path) -> None:
    """Up to the installation, which a stand-in for uv writes down."""
    programs, venv = tmp_path / "programs", tmp_path / "venv"
    programs.mkdir()
    does = f'case $* in *--help) echo --excludes ;; *) echo "$@" > {tmp_path}/installed ;; esac'
    (programs / "uv").write_text(f"#!/bin/sh\n{does}\n")
    (programs / "uv").chmod(0o755)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    environ = {
        **os.environ,
        **variables(),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OSD_VENV": str(venv),
        "OSD_PYTHON": sys.executable,
    }
    (_, script) = steps("RUN")
    done = subprocess.run([image / script], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    installed = (tmp_path / "installed").read_text()
    assert "-c constraints/gpu.txt -e .[gpu,dev]" in installed
    assert (image / "constraints/gpu.txt").exists() and (venv / ".osd-setup").exists()
