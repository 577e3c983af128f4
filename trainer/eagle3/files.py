"""Reads a head of either form into the trainer. It is exported as every draft is: under the names,
with the files and dtypes of the release it came from (`trainer.draft.export_draft`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from osd.errors import ReleaseError
from osd.models import eagle3
from osd.models.compatibility import read_config
from trainer.eagle3.head import HeadModel
from trainer.eagle3.layer import Eagle3Head
from trainer.eagle3.vocabulary import DraftVocabulary
from trainer.files import checkpoint_tensors, read_tensors

if TYPE_CHECKING:
    from trainer.eagle3.features import TargetFeatures


def load_head(directory: Path, features: TargetFeatures | None) -> HeadModel:
    """The head in a directory, float32, on the CPU. Raises `ReleaseError` where a tensor is missing
    or there is no target beside it, `ConfigError` for a configuration that is not served."""
    if features is None:
        raise ReleaseError(
            f"{directory}: is an EAGLE-3 head, which is trained beside its target; set "
            "serving.target to the target that serves"
        )
    config = read_config(directory)
    spec = eagle3.spec_of(config, directory)
    tensors = _read(directory)
    hf = Eagle3Head(spec)
    if missing := sorted(set(hf.state_dict()) - set(tensors)):
        raise ReleaseError(
            f"{directory}: the head has no {missing[0]} ({len(missing)} such); copy it again"
        )
    hf.load_state_dict({name: tensors[name] for name in hf.state_dict()})
    # Copies, so that the memory of the whole file is let go.
    kept = {name: tensors[name].clone() for name in tensors if name not in hf.state_dict()}
    own = kept.get(eagle3.EMBEDDING)
    return HeadModel(
        hf.eval(),
        DraftVocabulary(kept.get(eagle3.D2T), spec.draft_vocab_size, spec.vocab_size),
        features.embedding() if own is None else own.float(),
        features.of(spec),
        features.num_depths,
        kept,
        config,
    )


def _read(directory: Path) -> dict[str, Tensor]:
    """Canonical name -> tensor; numbers that are trained in float32."""
    files = {file for file, _ in checkpoint_tensors(directory).values()}
    found = {
        eagle3.canonical(name): tensor
        for file in sorted(files)
        for name, tensor in read_tensors(file).items()
    }
    return {
        name: tensor.float()
        if torch.is_floating_point(tensor) and name != eagle3.EMBEDDING
        else tensor
        for name, tensor in found.items()
    }
