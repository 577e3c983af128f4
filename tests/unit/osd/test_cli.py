"""A user who makes a mistake sees one line that names the key and the remedy.

The exit status is 2, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from osd.observe.history import History
from osd.records import Event, SwapReport
from tests.support.commands import run_osd
from tests.support.dashboards import Scene, served
from tests.support.paths import ROOT

Osd = Callable[..., subprocess.CompletedProcess[str]]


def model_at(directory: Path, words: list[str], *, vocab_size: int | None = None) -> Path:
    """All of a model but weights that mean something: enough for every check before a start."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": vocab_size or len(words)})
    )
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(directory / "tokenizer.json")
    )
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a draft that belong together."""
    words = ["a", "b", "c", "d"]
    return model_at(tmp_path / "target", words), model_at(tmp_path / "draft", words)


@pytest.fixture
def osd(tmp_path: Path) -> Osd:
    """Run `osd` with an empty runtime directory and temporary directory of its own."""
    (tmp_path / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OSD_")}
    environ = kept | {
        "OSD_RUNTIME_DIR": str(tmp_path / "run"),
        "TMPDIR": str(tmp_path / "tmp"),
        "HF_HUB_OFFLINE": "1",
    }

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return run_osd(*map(str, arguments), environ=environ, cwd=ROOT)

    return run


@pytest.fixture
def serve(osd: Osd, tmp_path: Path, models: tuple[Path, Path]) -> Osd:
    """`osd serve` of that pair on free ports; arguments come last, so they win."""

    def run(*arguments: object, target: object = models[0], draft: object = models[1]) -> Any:
        common = ("serving.port=0", "control.port=0", f"data_dir={tmp_path / 'data'}")
        return osd("serve", target, "--draft", draft, *common, *arguments)

    return run


def refusal(done: subprocess.CompletedProcess[str], tmp_path: Path) -> str:
    """The one line on stderr of a command that was refused and left nothing running or lying
    about."""
    assert done.returncode == 2, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list((tmp_path / "tmp").glob("osd-*")) == []
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []
    assert processes_naming(tmp_path) == []
    return lines[0]


def processes_naming(path: Path) -> list[str]:
    """Command lines of other processes in which `path` occurs: a Valkey, a Ray, an engine of this
    test."""
    others = (p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    texts = [" ".join(process.info["cmdline"] or ()) for process in others]
    return [text for text in texts if str(path) in text]


# Models


def test_a_missing_model_directory(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve(target=tmp_path / "nowhere"), tmp_path)
    assert line.startswith(
        f"osd: serving.target={tmp_path / 'nowhere'}: no such directory; give a model directory"
    )


def test_a_missing_draft(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve(draft="./nowhere"), tmp_path)
    assert line.startswith("osd: serving.draft=./nowhere: no such directory;")


def test_no_target_at_all(osd: Osd, tmp_path: Path) -> None:
    line = refusal(osd("serve", "serving.port=0", "control.port=0"), tmp_path)
    remedy = "give models, as in `osd serve ./target --draft ./draft`"
    assert line == f"osd: serving.target is not set: {remedy}"


def test_a_directory_that_holds_no_model(serve: Osd, tmp_path: Path) -> None:
    assert "no config.json there" in refusal(serve(target=tmp_path), tmp_path)


def test_a_draft_with_another_tokenizer(serve: Osd, tmp_path: Path) -> None:
    other = model_at(tmp_path / "other", ["a", "b", "d", "c"])
    line = refusal(serve(draft=other), tmp_path)
    assert line.startswith(
        f"osd: serving.draft={other}: another tokenizer than the target's (they disagree on 'c': "
    )


def test_a_draft_of_another_size_whose_tokenizer_is_not_there(serve: Osd, tmp_path: Path) -> None:
    other = model_at(tmp_path / "other", ["a", "b", "c", "d"], vocab_size=8)
    (other / "tokenizer.json").unlink()
    line = refusal(serve(draft=other), tmp_path)
    why = f"has 8 tokens, the target 4, and {other} holds no tokenizer.json"
    assert f"serving.draft={other}: {why}" in line


def test_a_draft_without_weights(serve: Osd, tmp_path: Path, models: tuple[Path, Path]) -> None:
    (models[1] / "model.safetensors").unlink()
    assert "no model.safetensors there" in refusal(serve(), tmp_path)


@pytest.mark.parametrize("command", ["serve", "profile", "train", "distil"])
def test_a_head_is_given_as_a_draft_is(osd: Osd, tmp_path: Path, command: str) -> None:
    """`--head` is where a draft model may stand beside it, in `osd evaluate` alone."""
    line = refusal(osd(command, "--head", tmp_path / "head"), tmp_path)
    assert line == (
        "osd: --head: is of `osd evaluate` alone; --draft takes an EAGLE-3 head, too, and `osd "
        "distil --new-head` makes one"
    )


def test_a_detached_start_says_why_it_failed(serve: Osd, tmp_path: Path) -> None:
    """What the service itself said last, not merely that it ended."""
    line = refusal(serve("--detach", draft="./nowhere"), tmp_path)
    assert line.startswith("osd: serving.draft=./nowhere: no such directory;")


def test_there_is_nothing_to_stop(osd: Osd, tmp_path: Path) -> None:
    assert refusal(osd("stop"), tmp_path).startswith(
        "osd: no service of this user is running here;"
    )


# Configuration


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say which traces: --all, or --domain and --before"),
        (["--all", "--domain", "sql"], "say which traces"),
        (["--before", "soon"], "'soon' is no time: give a date like 2026-11-02, or an age like 7d"),
    ],
)
def test_a_purge_that_does_not_say_of_what(osd: Osd, arguments: list[str], said: str) -> None:
    done = osd("traces", "purge", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_an_unknown_key_is_named_with_the_one_meant(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve("serving.prot=1"), tmp_path)
    assert line == "osd: serving.prot (command line): no such key; did you mean serving.port?"


def test_an_unknown_key_in_a_file(serve: Osd, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer:\n  learning_rat: 1\n")
    line = refusal(serve("--config", file), tmp_path)
    why = "no such key; did you mean trainer.learning_rate?"
    assert line == f"osd: trainer.learning_rat ({file}): {why}"


def test_a_value_that_does_not_fit(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve("speculation.k_max=99"), tmp_path)
    assert line.startswith("osd: speculation.k_max=99 (command line): ")


def test_a_vllm_argument_that_is_ours(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve("serving.vllm.port=1"), tmp_path)
    assert "port is not yours to set here; use serving.port" in line


def test_an_override_of_unknown_form(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve("serving.port:9000"), tmp_path)
    assert line.startswith("osd: 'serving.port:9000': ") and "section.key=value" in line


def test_a_missing_configuration_file(osd: Osd, tmp_path: Path) -> None:
    line = refusal(osd("serve", "--config", tmp_path / "no.yaml"), tmp_path)
    assert line == (
        f"osd: {tmp_path / 'no.yaml'}: cannot be read (No such file or directory); give the path "
        "of a YAML file"
    )


def test_config_show_prints_each_value_and_its_origin(osd: Osd, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer:\n  batch_size: 3\n")
    done = osd(
        "config",
        "show",
        file,
        "serving.port=9000",
        "serving.replicas={min: 1, max: 2}",
        "buffer.redis_url=redis://me:s3cret@h:1/0",
        "serving.vllm.api_key=s3cret",
        "serving.vllm.max_num_batched_tokens=64",
        "serving.env.HF_TOKEN=s3cret",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "serving.port = 9000    # command line" in lines
    assert "serving.replicas.max = 2    # command line" in lines
    assert f"trainer.batch_size = 3    # {file}" in lines
    assert "control.port = 8001    # default" in lines
    assert 'buffer.redis_url = "redis://h:1/0"    # command line' in lines, (
        "neither user nor password"
    )
    shown = '{"api_key": "***", "max_num_batched_tokens": 64}'
    assert f"serving.vllm = {shown}    # command line" in lines
    assert "s3cret" not in done.stdout


# The machine


@pytest.mark.parametrize("section", ["serving", "control"])
def test_a_port_in_use(serve: Osd, tmp_path: Path, section: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = refusal(serve(f"{section}.port={port}"), tmp_path)
    assert line.startswith(
        f"osd: {section}.port={port}: cannot listen on 127.0.0.1:{port} (Address already in use)"
    )
    assert f"{section}.port=N" in line


def test_one_port_for_both(serve: Osd, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = refusal(serve(f"serving.port={port}", f"control.port={port}"), tmp_path)
    assert line == f"osd: control.port={port}: the service port and the control port must differ"


def test_a_redis_that_does_not_answer(serve: Osd, tmp_path: Path) -> None:
    line = refusal(serve("--redis-url", "redis://127.0.0.1:1"), tmp_path)
    assert line.startswith("osd: buffer.redis_url: ")
    assert "127.0.0.1:1" in line and "private one" in line


def test_a_redis_url_that_is_none(serve: Osd, tmp_path: Path) -> None:
    assert "buffer.redis_url" in refusal(serve("--redis-url", "localhost"), tmp_path)


@pytest.mark.parametrize("key", ["releases.dir", "data_dir"])
def test_a_directory_that_cannot_be_written(serve: Osd, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(serve(f"{key}={tmp_path / 'file' / 'below'}"), tmp_path)
    assert line.startswith(f"osd: {key}: ")
    assert str(tmp_path / "file") in line and f"{key}=DIRECTORY" in line


def test_a_python_too_old(tmp_path: Path) -> None:
    python = tmp_path / "python3.8"
    python.write_text('#!/bin/sh\ncase $1 in -V) echo "Python 3.8.20" ;; *) exit 1 ;; esac\n')
    python.chmod(0o755)
    environ = os.environ | {
        "OSD_PYTHON": str(python),
        "OSD_VENV": str(tmp_path / "venv"),
        "OSD_EXTRA": "cpu",
    }
    done = subprocess.run(
        [ROOT / "scripts" / "setup.sh"],
        env=environ,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"setup: {python} is Python 3.8.20: Python 3.11, 3.12 or 3.13 is needed; set OSD_PYTHON to "
        "one\n"
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("python", "asked"), [("cp311", "torch from disk"), ("cp312", "torch from cpu")]
)
def test_a_cpu_build_of_torch_on_disk_is_taken_by_its_own_python(
    python: str, asked: str, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    says = 'echo "torch from ${UV_TORCH_BACKEND:-disk}"'
    uv = f"case $* in *--help) echo --excludes ;; *) {says} ;; esac"
    assert set_up(tmp_path, python, uv, UV_FIND_LINKS=str(wheels)) == asked


def test_a_uv_that_is_too_old_is_not_used(tmp_path: Path) -> None:
    uv = 'case $* in *--excludes*) exit 2 ;; *) echo "old uv" ;; esac'
    assert set_up(tmp_path, "cp311", uv) == "own uv"


def set_up(tmp_path: Path, python: str, uv: str, **given: str) -> str:
    """The last line that scripts/setup.sh says where these are Python and uv."""
    programs, venv = tmp_path / "bin", tmp_path / "venv"
    programs.mkdir()
    make_venv = '"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;'
    install_uv = """*"pip install"*uv*) cd "$(dirname "$0")" &&
        printf '#!/bin/sh\\necho "own uv"\\n' >uv && chmod +x uv ;;"""
    fakes = {
        "python": f'case "$*" in *print*) echo {python} ;; {make_venv} {install_uv} esac',
        "uv": uv,
    }
    for name, body in fakes.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if k != "UV_TORCH_BACKEND"} | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OSD_PYTHON": str(programs / "python"),
        "OSD_VENV": str(venv),
        "OSD_EXTRA": "cpu",
    }
    done = subprocess.run(
        [ROOT / "scripts" / "setup.sh"],
        env=environ | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_help_of_train_shows_how_a_pool_is_made(osd: Osd) -> None:
    shown = " ".join(osd("train", "--help").stdout.split())
    assert "--draft ./draft --out ./drafts --pool 3" in shown


# A running service


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("top",),
        ("stop",),
        ("logs",),
        ("pause",),
        ("drafts", "list"),
        ("drafts", "promote", "2"),
    ],
    ids=" ".join,
)
def test_no_service_is_running(osd: Osd, tmp_path: Path, command: tuple[str, ...]) -> None:
    line = refusal(osd(*command), tmp_path)
    remedy = "start one with `osd serve`, or give --url"
    assert line == f"osd: no service of this user is running here; {remedy}"


def test_a_character_that_the_output_lacks_ends_no_command() -> None:
    """As in a shell whose locale is an old one."""
    scene = Scene(History())
    scene.changes = {"deployment": "перевод"}
    with served(scene) as url:
        for command, said in (("drafts list", b"? predicted"), ("status", b"??????? at ")):
            done = subprocess.run(
                [sys.executable, "-m", "osd", *command.split(), "--url", url],
                env=os.environ | {"PYTHONIOENCODING": "latin-1"},
                cwd=ROOT,
                capture_output=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            assert said in done.stdout


def test_the_last_round_is_told_however_many_replicas_swapped_since(osd: Osd) -> None:
    scene = Scene(History())
    published = Event(at=time.time() - 60, kind="published", text="v3: better", version=3)
    scene.history.add(published)
    for number in range(150):
        scene.history.add(swap_of(f"replica-{number}"))
    with served(scene) as url:
        done = osd("status", "--url", url)
    assert re.search(r"last round +published 1 min .*ago: v3: better", done.stdout), done.stdout


def swap_of(replica: str) -> SwapReport:
    return SwapReport(
        at=time.time(),
        replica=replica,
        version=3,
        previous=2,
        ok=True,
        stage_s=0.1,
        pause_s=0.006,
    )


def test_the_note_of_a_service_that_was_killed_does_not_count(osd: Osd, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "run").mkdir()
    note = {"deployment": "d", "pid": ended.pid, "service_url": "", "control_url": "", "token": ""}
    (tmp_path / "run" / "d.json").write_text(json.dumps(note))
    done = osd("status")
    assert done.returncode == 2 and "no service of this user is running here" in done.stderr
