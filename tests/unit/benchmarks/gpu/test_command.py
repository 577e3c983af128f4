"""`scripts/gpu` as it is called: what it refuses, and what it lists."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import pairs
from benchmarks.gpu.__main__ import chosen, main
from benchmarks.gpu.registry import CHECKS, V1_ASYNC, V2_ASYNC
from osd.errors import ConfigError
from tests.support.paths import ROOT


def test_the_script_lists_all_checks(tmp_path: Path) -> None:
    ended = subprocess.run(
        [ROOT / "scripts" / "gpu", "--list"], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [c.name for c in CHECKS]


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "swap"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "nothing"], "--only nothing: there is no such check; one of syncs-v1-async"),
        (["--target", "x"], "give both or neither"),
        (["--target", "x", "--draft", "x"], "--target x: holds no config.json"),
    ],
)
def test_what_it_cannot_use_is_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--dry-run", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_chosen_checks_keep_the_order_of_the_registry() -> None:
    assert [c.name for c in chosen(["varying-k", "swap"])] == ["swap", "varying-k"]
    assert chosen(None) == list(CHECKS)


def test_the_swap_and_each_k_are_checked_on_both_runners_and_a_cpu_repeats_neither() -> None:
    by_name = {check.name: check for check in CHECKS}
    assert len(by_name) == len(CHECKS)
    for module in ("swap", "varying_k"):
        checks = [check for check in CHECKS if check.module.endswith(f".{module}")]
        assert {check.mode for check in checks} >= {V1_ASYNC, V2_ASYNC}
        assert [check.mode for check in checks if check.has_dry_run] == [V1_ASYNC]
        assert all(check.shows.startswith(check.mode.name) for check in checks)
        assert min(check.seconds for check in checks) > 110, "a pair of 0.9 B took longer"
    assert by_name["swap-v2-async"].mode is by_name["varying-k-v2-async"].mode is V2_ASYNC


def test_a_draft_in_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="as one safetensors file"):
        pairs.check_given(tmp_path, tmp_path)
