"""The draft in the trainer: loaded in float32 from a Hugging Face directory, and exported to one
that vLLM can load.

Legend: B lines, S tokens, N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from osd.common.files import open_to_others
from osd.common.memory import has_run_out
from osd.common.model_directory import RELEASE_RECORD, WEIGHTS, digests
from osd.errors import ConfigError, OSDError, ReleaseError, first_line
from osd.models import eagle3
from osd.models.compatibility import read_config
from trainer import adapter
from trainer.batch import Batch, Proposals, RowBatch, TrainBatch, likeliest
from trainer.eagle3.files import load_head
from trainer.eagle3.head import HeadModel
from trainer.files import checkpoint_tensors, write_aside
from trainer.loss import Coarse, coarsen
from trainer.names import names_in_model

if TYPE_CHECKING:
    from trainer.eagle3.features import TargetFeatures

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Weights in any format, and the index of sharded weights. The export copies all other files of the
base's directory."""
LOADING = threading.Lock()
"""Transformers sets process-wide switches while it loads a model, and drafts are evaluated and
trained in different threads."""


class RowModel(torch.nn.Module):
    """A causal model that computes only some rows of its logits, never all of [B, S, V].

    The output layer runs on the hidden states of these rows. Models that transform their logits (a
    soft cap, a scale) are detected at construction and computed in full. `can_pack` says whether
    several sequences may share a line.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self._has_plain_head = _has_plain_head(hf)
        self.can_pack = _can_pack(hf)

    @property
    def vocab_size(self) -> int:
        return int(self.hf.config.vocab_size)

    @property
    def max_length(self) -> int:
        """Tokens in the model's context."""
        return int(getattr(self.hf.config, "max_position_embeddings", None) or 2**31)

    def names_in_model(self, stored: Collection[str], known: Collection[str]) -> dict[str, str]:
        """Name in the checkpoint -> name in the model."""
        return names_in_model(self.hf, stored, known)

    def prepared(self, batch: Batch) -> Batch:
        """The batch with all that the draft reads, which tokens alone are."""
        return batch

    def inputs(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """What `forward` takes."""
        return batch.inputs

    def forward(
        self, ids_BS: Tensor, position_ids_BS: Tensor, row_b_N: Tensor, row_s_N: Tensor
    ) -> Tensor:
        """logits_BSV[row_b_N, row_s_N], [N, V]. Padding needs no mask: it is on the right, where
        causal attention does not look."""
        inputs: dict[str, Any] = {"input_ids": ids_BS, "use_cache": False}
        if self.can_pack:
            inputs["position_ids"] = position_ids_BS
        if not self._has_plain_head:
            return self.hf(**inputs).logits[row_b_N, row_s_N]
        hidden_BSH = self.hf.base_model(**inputs).last_hidden_state
        return self.hf.get_output_embeddings()(hidden_BSH[row_b_N, row_s_N])

    def distances(self, logits_NV: Tensor, batch: TrainBatch) -> Iterator[tuple[Tensor, Coarse]]:
        """The draft and the target at each row, which has the whole share [N]: what a model
        proposes does not depend on where its draft began."""
        both = coarsen(
            logits_NV, batch.target_ids_NK, batch.target_logprobs_NK, batch.tail_logprob_N
        )
        yield torch.ones_like(batch.weight_N), both

    def proposals(self, batch: RowBatch) -> Proposals:
        """What the draft would propose: alike at all depths, G = 1."""
        logits_NV = self(*batch.inputs)
        return Proposals(ids_GN=logits_NV.argmax(-1)[None], likeliest_KN=likeliest(logits_NV))

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a plain model of these weights, for `load_draft`."""
        self.hf.save_pretrained(directory, state_dict=dict(weights))


Draft = RowModel | HeadModel
"""What is trained: both kinds have the same methods."""


def load_draft(path: str | Path, features: TargetFeatures | None = None) -> Draft:
    """The draft in `path`, float32, on the CPU, without dropout. `features`: of the target, which a
    head reads.

    Raises `ReleaseError` when it cannot be read, or when its checkpoint lacks a parameter under the
    name that the model gives it, because such a draft could not be exported again.
    """
    try:
        stored = checkpoint_tensors(Path(path))
        if eagle3.is_eagle3(read_config(Path(path))):
            return load_head(Path(path), features)
        with LOADING:
            hf = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers and its quantisers raise many types
        is_told = isinstance(error, OSDError) and not isinstance(error, ConfigError)
        if is_told or has_run_out(error):
            raise
        raise ReleaseError(
            f"{path}: not a draft model that can be loaded ({first_line(error)})"
        ) from error
    parameters = dict(hf.named_parameters(remove_duplicate=False))
    names = set(names_in_model(hf, stored, parameters).values())
    covered = {id(p) for name, p in parameters.items() if name in names}
    missing = [name for name, parameter in hf.named_parameters() if id(parameter) not in covered]
    if missing:
        raise ReleaseError(
            f"{path}: the checkpoint has no {missing[0]} ({len(missing)} such); use one with "
            f"tensors named as in {type(hf).__name__}"
        )
    return RowModel(let_go_of_files(hf).eval())


def let_go_of_files(hf: PreTrainedModel) -> PreTrainedModel:
    """The model in memory of its own. Weights that were stored in float32 are the mapped file,
    which another machine may cut short or remove."""
    for tensor in (*hf.parameters(), *hf.buffers()):
        tensor.data = tensor.data.clone()
    return hf


def export_draft(
    model: Draft, base: str | Path, out: Path, weights: Mapping[str, Tensor] | None = None
) -> dict[str, str]:
    """Write the draft to `out` with the files, tensor names, shapes and dtypes of its base. Return
    the sha256 of each file by its name.

    `weights`, where given, stand in place of the model's own. A sharded base becomes one
    `model.safetensors`. Tensors of the base that the model does not know are copied.
    """
    weights = weights or adapter.merged(model.hf)
    stored = checkpoint_tensors(Path(base))
    own_name = model.names_in_model(stored, weights)
    tensors: dict[str, Tensor] = {}
    for name, (file, dtype) in stored.items():
        if own_name[name] in weights:
            tensors[name] = (
                weights[own_name[name]].detach().to("cpu", dtype, copy=True).contiguous()
            )
        else:
            with safe_open(file, framework="pt") as opened:
                tensors[name] = opened.get_tensor(name).clone()
    with write_aside(out) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        open_to_others(aside / WEIGHTS)
        for path in Path(base).iterdir():
            is_copied = path.name != RELEASE_RECORD and not path.name.endswith(_NOT_COPIED)
            if path.is_file() and is_copied:
                shutil.copyfile(path, aside / path.name)
        written = digests(aside)
    return written


def _has_plain_head(hf: PreTrainedModel) -> bool:
    """Whether the logits are exactly the output layer applied to the last hidden states."""
    head: Any = hf.get_output_embeddings()
    if head is None or hf.base_model is hf:
        return False
    with torch.no_grad():
        ids_BS = torch.arange(min(4, int(hf.config.vocab_size)), device=hf.device)[None]
        hidden_BSH = hf.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
        if hidden_BSH.shape[-1] != head.weight.shape[-1]:
            return False
        return torch.allclose(
            head(hidden_BSH), hf(input_ids=ids_BS, use_cache=False).logits, atol=1e-4, rtol=1e-4
        )


def _can_pack(hf: PreTrainedModel) -> bool:
    """Whether position ids alone keep two sequences on one line apart: the second gives the logits
    that it gives on a line of its own."""
    if "position_ids" not in inspect.signature(hf.forward).parameters:
        return False
    with torch.no_grad():
        ids_S = torch.arange(6, device=hf.device) % int(hf.config.vocab_size)
        position_ids_BS = torch.tensor([[0, 1, 2, 0, 1, 2]], device=hf.device)
        packed_SV = hf(input_ids=ids_S[None], position_ids=position_ids_BS, use_cache=False).logits[
            0, 3:
        ]
        alone_SV = hf(input_ids=ids_S[None, 3:], use_cache=False).logits[0]
        return torch.allclose(packed_SV, alone_SV, atol=1e-4, rtol=1e-4)
