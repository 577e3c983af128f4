"""What is no safetensors file is refused in one line, whatever its first bytes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from osd.errors import ConfigError
from osd.models.checkpoint_files import WEIGHTS, stored_tensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n"
DEEP = b"[" * 50_000 + b"]" * 50_000


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (POINTER, "it is a pointer of Git LFS, for which `git lfs pull` gets the file"),
        (b"<!DOCTYPE html><html>not found</html>", "its header is longer than the file"),
        (b"\xff" * 64, "its header is longer than the file"),
        (with_header(b"[]"), "its header is no mapping"),
        (with_header(b"null"), "its header is no mapping"),
        (with_header(b'{"a": 1}'), "'int' object is not subscriptable"),
        (with_header(DEEP), "maximum recursion depth exceeded"),
    ],
)
def test_what_is_no_file_of_weights_is_said(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        stored_tensors(tmp_path)
    line = str(error.value)
    assert line.startswith(f"{tmp_path / WEIGHTS}: not a safetensors file that can be read ({why}")
    assert line.endswith("; copy the draft again") and "\n" not in line
