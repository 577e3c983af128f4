"""Mistakes with `osd traces export`, `osd train` and `osd distil`.

Each gives one line and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffers.codec import encode_trace
from buffers.trace_file import write_traces
from tests.support.commands import run_osd
from tests.support.heads import write_head
from tests.support.paths import ROOT
from tests.support.served_targets import served_target
from tests.support.tiny_drafts import TARGET_ID, chain_traces, save_draft

SETTINGS = [
    "trainer.learning_rate=1.0e-2",
    "trainer.max_length=64",
    "gate.min_holdout_traces=4",
    "trainer.device=cpu",
    "trainer.replay_batches=1",
]


class Shell:
    """A directory with a draft and a file of traces, and commands that run in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        save_draft(directory / "draft")
        with write_traces(directory / "a.traces", TARGET_ID) as file:
            for trace in chain_traces(64) + chain_traces(12, start=500, holdout=True):
                file.add(encode_trace(trace))
        (directory / "p.txt").write_text("hello\n" * 64)
        self.before = self.names()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OSD_")}
        return kept | {"OSD_RUNTIME_DIR": str(self.directory / "run"), "PYTHONPATH": str(ROOT)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As a process of its own."""
        command = [sys.executable, "-m", "osd", *arguments]
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def refusal(self, *arguments: str, status: int = 2) -> str:
        """The one line of a command that was refused and left nothing."""
        done = run_osd(*arguments, environ=self.environ, cwd=self.directory)
        assert done.returncode == status, done
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert self.names() == self.before
        return lines[0].removeprefix("osd: ")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_train_takes_more_files_and_overrides_in_any_order(shell: Shell) -> None:
    (shell.directory / "b.traces").write_bytes((shell.directory / "a.traces").read_bytes())
    files = ["--traces", "a.traces", "b.traces"]
    done = shell.run(
        "train",
        *SETTINGS[:2],
        *files,
        "--draft",
        "draft",
        *SETTINGS[2:],
        "--out",
        "new",
        "--epochs",
        "1",
    )
    assert done.returncode == 0, done.stderr
    said = "traces: 64 to learn from, 12 held out, 76 repeated left out; target target-a"
    assert said in done.stdout
    assert done.stdout.splitlines()[-1] == "draft: new"
    assert "training: 64 of 64 traces" in done.stderr


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ["a.tracks"],
            "a.tracks: cannot be read (No such file or directory); give a file of `osd traces "
            "export`",
        ),
        (["p.txt"], "p.txt: not a file of traces; give a file of `osd traces export`"),
        (["a.traces", "trainer.epochs=3"], "trainer.epochs (command line): no such key"),
        (["a.traces", "--draft", "nowhere"], "serving.draft=nowhere: no such directory"),
        (["a.traces", "--out", "p.txt"], "--out: p.txt: exists already; name a new directory"),
    ],
    ids=["no file", "another file", "no key", "no draft", "out exists"],
)
def test_train_refuses(shell: Shell, arguments: list[str], line: str) -> None:
    status = 1 if "give a file of" in line else 2
    said = shell.refusal(
        "train", "--draft", "draft", "--out", "new", "--traces", *arguments, status=status
    )
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--out", "new", "--traces", "a.traces", "b.traces"], "b.traces: cannot be read"),
        (["--out", "p.txt", "--traces", "a.traces"], "--out: p.txt: exists already"),
    ],
)
def test_train_looks_at_its_files_before_a_draft_is_built(
    shell: Shell, more: list[str], line: str
) -> None:
    """Or fetched."""
    environ = shell.environ | {"OSD_CACHE_DIR": str(shell.directory / "cache")}
    done = run_osd("train", "--draft", "tiny", *more, environ=environ, cwd=shell.directory)
    assert done.stderr.startswith(f"osd: {line}") and len(done.stderr.splitlines()) == 1
    assert shell.names() == shell.before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What was started in the background of a shell may ignore Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_training_keeps_what_the_rounds_before_brought(
    number: signal.Signals, shell: Shell, interruptible: None
) -> None:
    given = ["--traces", "a.traces", "--draft", "draft", "--out", "new", "--epochs", "12"]
    command = [sys.executable, "-m", "osd", "train", *SETTINGS, *given]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=shell.directory, env=shell.environ, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while " traces after " not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(number)
        said, _ = process.communicate(timeout=100)
    assert process.returncode not in (0, -number), said
    assert "\nstopped after " in said and said.endswith("draft: new\n")
    assert shell.names() == sorted([*shell.before, "new"])
    assert (shell.directory / "new" / "distillation.json").is_file()


def test_train_hands_the_number_of_drafts_to_the_pool(shell: Shell) -> None:
    """A pool is of draft models, and says so of a head before it reads a trace."""
    write_head(shell.directory / "head", served_target(shell.directory / "target"))
    shell.before = shell.names()
    given = ["--draft", "head", "--traces", "a.traces", "--out", "new", "serving.target=target"]
    said = shell.refusal("train", "--pool", "3", *given)
    assert said.startswith(f"--pool 3: serving.draft={shell.directory / 'head'} is a head")


def test_train_without_a_draft(shell: Shell) -> None:
    assert "serving.draft is not set" in shell.refusal(
        "train", "--out", "new", "--traces", "a.traces"
    )


def test_export_without_a_service(shell: Shell) -> None:
    line = "no service of this user is running here; start one with `osd serve`, or give --url"
    assert shell.refusal("traces", "export", "new.traces") == line


def test_export_to_a_file_that_exists(shell: Shell) -> None:
    line = "FILE: a.traces: exists already; name another file, or replace it with --force"
    assert shell.refusal("traces", "export", "a.traces", "--url", "http://127.0.0.1:1") == line


@pytest.mark.parametrize(
    "prompts, line",
    [
        ("", "--prompts: p.txt: holds no prompt"),
        (
            "hello\n" * 63,
            "--prompts: p.txt: 63 prompts: about 7 held out (one in 8), gate.min_holdout_traces=8 "
            "are",
        ),
        ("hello\n" * 64, "serving.target is not set"),
    ],
    ids=["none", "too few", "enough"],
)
def test_distil_refuses_before_anything_is_started(shell: Shell, prompts: str, line: str) -> None:
    (shell.directory / "p.txt").write_text(prompts)
    assert shell.refusal(
        "distil", "--draft", "draft", "--prompts", "p.txt", "--out", "new"
    ).startswith(line)


def test_distil_will_not_replace_kept_traces(shell: Shell) -> None:
    options = ["--prompts", "p.txt", "--out", "new", "--keep-traces", "a.traces"]
    assert shell.refusal("distil", *options).startswith("--keep-traces: a.traces: exists already")


def test_distil_will_not_keep_traces_in_the_place_of_the_draft(shell: Shell) -> None:
    options = ["--prompts", "p.txt", "--out", "new", "--keep-traces", "./new"]
    assert shell.refusal("distil", *options).startswith("--keep-traces: new: is --out as well")


HEAD = ["distil", "--new-head", "--prompts", "p.txt", "--out", "new"]


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["target", "--draft", "draft"], "--new-head: makes a new draft, and serving.draft=draft"),
        (["target", "serving.draft=tiny"], "--new-head: makes a new draft, and serving.draft=tiny"),
        (["target", "--draft-vocab", "0"], "--draft-vocab=0: must be between 1 and the 96 tokens"),
        (["target", "--draft-vocab", "97"], "--draft-vocab=97: must be between 1 and the 96"),
        (["draft"], "--new-head: {here}/draft: has 1 layers, and a head reads before"),
        (["target", "trainer.sampling=mixed"], "trainer.sampling=mixed: an EAGLE-3 head learns"),
        (["target", "trainer.method=lora"], "--new-head: trainer.method=lora trains adapters"),
        ([], "serving.target is not set"),
    ],
    ids=["a draft", "a key", "none", "too many", "flat", "sampling", "lora", "no target"],
)
def test_a_new_head_is_refused(shell: Shell, arguments: list[str], line: str) -> None:
    served_target(shell.directory / "target")
    shell.before = shell.names()
    said = shell.refusal(*HEAD, *arguments)
    assert said.startswith(line.format(here=shell.directory))


def test_distil_without_a_draft_names_both_ways_to_begin(shell: Shell) -> None:
    said = shell.refusal("distil", "target", "--prompts", "p.txt", "--out", "new")
    assert said.startswith("--draft: is missing; give the draft to begin with, or --new-head for")


def test_a_draft_vocabulary_is_of_a_new_head(shell: Shell) -> None:
    options = ["--prompts", "p.txt", "--out", "new", "--draft-vocab", "9"]
    said = shell.refusal("distil", "--draft", "draft", *options)
    assert said.startswith("--draft-vocab: is of a new head; give --new-head, too")
