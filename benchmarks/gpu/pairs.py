"""`python -m benchmarks.gpu.pairs DIRECTORY`: the models of the checks, built without training.

    small/    target, draft, stranger      random; float32 in exact comparisons
    costly/   target, draft, stranger      the target is the draft's source, widened: the same
                                           function at the cost of a far larger model
                                           (`osd/tiny/widen.py`), or a pair given by its user

A draft is its target's small source with a little noise, and often accepted. A stranger has the
draft's shape and is hardly ever accepted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import models
from benchmarks.engines.models import Size
from osd.errors import ConfigError

SMALL, COSTLY = "small", "costly"
WEIGHTS = "model.safetensors"
SHARPNESS = 8.0
"""Factor on the last norm: the most likely token gets about half of the mass."""
ATTENTION = 3.0
"""Factor on attention's weights. Without it the answers of random models repeat one token."""
NOISE, STRANGE_NOISE = 0.02, 3.0

SMALL_SIZE = Size(vocab_size=512, hidden_size=128, num_layers=2, is_tied=True)
CPU_WIDTH = {"hidden_size": 256, "num_layers": 3, "intermediate_size": 1024}
GPU_SIZE = Size(vocab_size=128_256, hidden_size=512, num_layers=2, is_tied=True)
"""The vocabulary of Llama 3: capture copies rows of logits."""
GPU_WIDTH = {"hidden_size": 2048, "num_layers": 16, "intermediate_size": 4096}
"""0.9 B parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Directories of a target and of two drafts that agree with it more and less."""

    target: Path
    draft: Path
    stranger: Path

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return int(json.loads((self.target / "config.json").read_text())["vocab_size"])

    @property
    def num_parameters(self) -> dict[str, int]:
        """Of target and draft, as their files say."""
        return {name: _num_parameters(getattr(self, name)) for name in ("target", "draft")}


def pair(models_directory: Path, kind: str) -> Pair:
    """Where a pair lies."""
    names = json.loads((models_directory / kind / "pair.json").read_text())
    return Pair(**{name: Path(path) for name, path in names.items()})


def build(directory: Path, *, is_real: bool, given: tuple[Path, Path] | None = None) -> None:
    """Build both pairs. `given`: target and draft to use as the costly pair."""
    _build_pair(directory / SMALL, SMALL_SIZE, None)
    if given is not None:
        _take(directory / COSTLY, *given)
    else:
        size, width = (GPU_SIZE, GPU_WIDTH) if is_real else (SMALL_SIZE, CPU_WIDTH)
        _build_pair(directory / COSTLY, size, width)


def check_given(target: Path, draft: Path) -> tuple[Path, Path]:
    """The two directories. Raises `ConfigError` where one of them cannot be used."""
    for name, path in (("--target", target), ("--draft", draft)):
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name} {path}: holds no config.json; name a model's directory")
    if not (draft / WEIGHTS).is_file():
        raise ConfigError(
            f"--draft {draft}: holds no {WEIGHTS}; save the draft as one safetensors file"
        )
    return target.resolve(), draft.resolve()


def _build_pair(directory: Path, size: Size, width: dict[str, int] | None) -> None:
    from osd.tiny.widen import widen

    source = directory / "source"
    models.build(size, source)
    _enliven(source)
    target = widen(source, directory / "target", **width) if width else source
    _note(directory, target, models.copy_with_noise(source, directory / "draft", NOISE))


def _take(directory: Path, target: Path, draft: Path) -> None:
    directory.mkdir(parents=True)
    _note(directory, target, draft)


def _note(directory: Path, target: Path, draft: Path) -> None:
    stranger = models.copy_with_noise(draft, directory / "stranger", STRANGE_NOISE, seed=2)
    paths = {"target": str(target), "draft": str(draft), "stranger": str(stranger)}
    (directory / "pair.json").write_text(json.dumps(paths))


def _enliven(directory: Path) -> None:
    """Make a random model's answers varied and its distributions sharp."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / WEIGHTS)
    for name in tensors:
        if "_proj" in name and "self_attn" in name:
            tensors[name] *= ATTENTION
    tensors["model.norm.weight"] *= SHARPNESS
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def _num_parameters(directory: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                shape = weights.get_slice(name).get_shape()
                total += _product(shape)
    return total


def _product(shape: Any) -> int:
    found = 1
    for length in shape:
        found *= int(length)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pairs")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--real", action="store_true", help="sizes for a GPU")
    parser.add_argument("--given", type=Path, nargs=2, metavar=("TARGET", "DRAFT"))
    arguments = parser.parse_args()
    given = tuple(arguments.given) if arguments.given else None
    build(arguments.directory, is_real=arguments.real, given=given)


if __name__ == "__main__":
    main()
