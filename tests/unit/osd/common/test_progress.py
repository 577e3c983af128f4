"""Progress on standard error, whether it is a terminal or not."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from osd.common.progress import progress, stages
from tests.support.paths import ROOT


def test_without_a_terminal_there_is_a_line_for_each_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("training", 8, "traces") as advance:
        for step in range(8):
            advance(1, f"loss {step}")
    lines = re.sub(r"after \d+ s", "after N s", capsys.readouterr().err).splitlines()
    assert lines == [
        "training: 8 traces",
        *(f"training: {done} of 8 traces after N s  loss {done - 1}" for done in (2, 4, 6, 8)),
    ]


def test_with_nothing_known_of_the_total_there_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("exporting", None, "traces") as advance:
        advance(5, "1 MB")
    assert capsys.readouterr().err == "exporting: traces\n"


def test_a_stage_without_a_unit_is_one_line_and_the_next_one_counts_for_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stages() as begin:
        begin("tokenizer")
        advance = begin("target", 2, "steps")
        advance(2)
    lines = re.sub(r"after \d+ s", "after N s", capsys.readouterr().err).splitlines()
    assert lines == ["tokenizer", "target: 2 steps", "target: 2 of 2 steps after N s"]


def test_a_quiet_build_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with stages(enabled=False) as begin:
        begin("target", 2, "steps")(2)
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_a_bar_and_text_as_it_is() -> None:
    code = (
        "from osd.common.progress import progress\n"
        "with progress('asking', 2, 'prompts') as advance: advance(2, 'no [/such] tag')"
    )
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=theirs, cwd=ROOT, timeout=60, check=False
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "2/2 prompts  no [/such] tag" in plain
