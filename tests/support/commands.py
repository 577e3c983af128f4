"""`osd` in this process, told and answering like a process of its own, whose start costs more than
most refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest import mock

from osd.cli import main


def run_osd(
    *arguments: str, environ: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """`osd ARGUMENTS`: its exit status and what it printed. Nothing that it sets outlives it."""
    command = ["osd", *arguments]
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    status = 0
    with _process(command, environ, cwd), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    said, refused = (stream.buffer.getvalue().decode() for stream in (out, err))
    return subprocess.CompletedProcess(command, status, said, refused)


@contextmanager
def _process(command: list[str], environ: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """What a process has for itself, for a while: arguments, environment, directory, handlers of
    signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(tempfile, "tempdir", None),
        chdir(cwd),
    ):
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
