"""A file of tensors is read as safetensors reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.models.tensor_file import DTYPES, TensorFile

SHAPES = {"matrix": (3, 5), "row": (7,), "number": (), "nothing": (0, 4)}


def test_every_kind_of_tensor_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        f"{kind} {name}": torch.randint(0, 2, shape).to(dtype)
        for kind, dtype in DTYPES.items()
        for name, shape in SHAPES.items()
    }
    save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    file, stored = TensorFile(tmp_path / "file"), load_file(tmp_path / "file")
    read = file.tensors()
    assert file.sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()
    assert read.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].float(), tensor.float())


def of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        (1 << 60).to_bytes(8, "little") + b"{}",
        of([]),
        of({"a": 3}),
        of({"a": {"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}}),
        of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}),
        of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
        of({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}),
    ],
)
def test_a_damaged_file_has_no_tensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        TensorFile(tmp_path / "file").tensors()
