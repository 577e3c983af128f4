"""Progress where standard error is no terminal, and where it is."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from osd.common.progress import progress
from tests.support.paths import ROOT


def test_without_a_terminal_there_is_a_line_for_each_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", 8, "traces") as advance:
        for step in range(8):
            advance(1, f"loss {step}")
    lines = re.sub(r"after \d+ s", "after N s", capsys.readouterr().err).splitlines()
    assert lines == [
        "training: 8 traces",
        *(f"training: {done} of 8 traces after N s  loss {done - 1}" for done in (2, 4, 6, 8)),
    ]


def test_with_nothing_known_of_the_total_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("exporting", None, "traces") as advance:
        advance(5, "1 MB")
    assert capsys.readouterr().err == "exporting: traces\n"


def test_a_terminal_sees_a_bar_and_text_as_it_is() -> None:
    code = (
        "from osd.common.progress import progress\nwith progress('asking', 2, 'prompts') as a: a(2, 'no [/such] tag')"
    )
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stderr=theirs, cwd=ROOT, timeout=60, check=False)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "2/2 prompts  no [/such] tag" in plain
