"""Whether the trainer can load the target, by its files and by what this machine has. Nothing is
loaded.

It needs it as a teacher (`trainer.sampling`), and for every head: the target's hidden states, which
a head reads, are computed anew.
"""

from __future__ import annotations

import shutil
import subprocess
from math import prod
from pathlib import Path

import psutil

from osd.common.wording import size
from osd.config.schema import Config
from osd.config.serving import argument
from osd.errors import ConfigError
from osd.models.compatibility import read_config
from osd.models.draft_cost import DTYPE_BYTES
from osd.models.eagle3 import read_spec, shapes

DTYPES = {"float": "float32", "half": "float16"}
"""vLLM's other names of types, as torch calls them."""
FLOAT32 = 4
SECONDS_FOR_GPUS = 30.0
"""A driver that was not in use is loaded first."""
OTHER_WEIGHTS = {
    "enable_lora": "requests may be answered by an adapter of the target",
    "quantization": "the engine serves quantised weights",
    "hf_overrides": "the engine serves the target with another configuration",
}
"""Arguments of `serving.vllm` under which the served target is not the one in its directory."""


def dtype_of(config: Config) -> str:
    """The type that the teacher computes in: the engine's where it is set, else that of the
    target's checkpoint ("auto")."""
    dtype = str(argument(config.serving.vllm, "dtype") or "auto")
    return DTYPES.get(dtype, dtype)


def is_needed(config: Config, *, is_head: bool) -> bool:
    """Whether the trainer asks the target itself."""
    return config.trainer.enabled and (is_head or config.trainer.sampling != "teacher")


def check_teacher(
    config: Config, target: Path, *, head: Path | None = None, is_offline: bool = False
) -> str:
    """What loading the target will take, in words. Raises `ConfigError` where the trainer cannot
    load it, or its rows would not be those of the target that serves.

    head: the draft, where it is one
    is_offline: training runs here, without a service
    """
    if head is not None and config.trainer.sampling != "teacher":
        raise ConfigError(
            f"trainer.sampling={config.trainer.sampling}: an EAGLE-3 head learns from what was "
            "served alone; use trainer.sampling=teacher"
        )
    if problem := _problem(config, target, head, is_offline):
        raise ConfigError(
            _for_sampling(config, problem)
            if head is None
            else _for_head(config, problem, is_offline)
        )
    room, where, _ = _room(config, is_offline)
    return f"{size(_held(config, target))} of weights in the trainer; {size(room)} {where}"


def _problem(config: Config, target: Path, head: Path | None, is_offline: bool) -> str:
    """Why the trainer cannot ask the target; "" when it can."""
    if (resource := config.ray.trainer_resource) and not is_offline:
        return (
            f"the trainer runs on another machine (ray.trainer_resource={resource}), of which is "
            "not known whether it has the target and the memory for it"
        )
    for name, why in OTHER_WEIGHTS.items():
        if value := argument(config.serving.vllm, name):
            return f"{why} (serving.vllm.{name}={value}), which the trainer has not"
    if "quantization_config" in read_config(target):
        return f"serving.target={target} is quantised, which the trainer cannot load"
    whole, trained = _weights(config, target), 0 if head is None else _trained(config, head)
    held = _held(config, target)
    room, where, num_engines = _room(config, is_offline)
    if held + num_engines * whole + trained > room:
        engine = f", in the engine {size(whole)}" if num_engines else ""
        learning = f", the head's training {size(trained)}" if trained else ""
        return (
            f"the target's weights take {size(held)} in the trainer{engine}{learning}, and "
            f"{size(room)} {where} (with a lower trainer.target_memory_bytes, layers stay in files)"
        )
    return ""


def _for_sampling(config: Config, problem: str) -> str:
    return (
        f"trainer.sampling={config.trainer.sampling}: {problem}; use trainer.sampling=teacher, "
        "which learns from what was served"
    )


def _for_head(config: Config, problem: str, is_offline: bool) -> str:
    remedy = (
        "train where the target as it was served can be loaded"
        if is_offline
        else "use trainer.enabled=false, which serves the head as it is, or let the trainer have "
        "the target"
    )
    return (
        f"serving.draft={config.serving.draft}: is a head, which learns from the target's hidden "
        f"states; {problem}; {remedy}"
    )


def _weights(config: Config, target: Path) -> int:
    """Bytes of the target's weights once the trainer has loaded them."""
    files = [*target.glob("model*.safetensors")] or [*target.glob("*.safetensors")]
    stored = sum(file.stat().st_size for file in files)
    of_file = read_config(target)
    own = DTYPE_BYTES.get(str(of_file.get("dtype") or of_file.get("torch_dtype")))
    asked = DTYPE_BYTES.get(dtype_of(config))
    return stored * asked // own if own and asked else stored


def _held(config: Config, target: Path) -> int:
    """Bytes of them that the trainer keeps in memory."""
    whole, most = _weights(config, target), config.trainer.target_memory_bytes
    return whole if most is None else min(whole, most)


def _trained(config: Config, head: Path) -> int:
    """Bytes of what a head is trained with, but for activations: its weights, in full training
    their gradients and AdamW's two moments, and the target's embedding, all in float32."""
    spec = read_spec(head)
    own = sum(map(prod, shapes(spec).values()))
    copies = 4 if config.trainer.method == "full" else 1
    return FLOAT32 * (copies * own + spec.vocab_size * spec.target_hidden_size)


def _room(config: Config, is_offline: bool) -> tuple[int, str, int]:
    """Bytes that there are, where; and how many engines load the target into them, too."""
    gpus = _gpu_bytes()
    if config.trainer.device != "cpu" and gpus:
        if config.trainer.num_gpus >= 1:
            return max(gpus), "has the GPU", 0
        share = config.trainer.gpu_memory_fraction
        return int(max(gpus) * share), f"of a GPU are its own (gpu_memory_fraction={share:g})", 0
    is_elsewhere = is_offline or config.serving.engines != "own" or config.ray.replica_resource
    num_engines = 0 if is_elsewhere or gpus else config.serving.replicas.max
    return psutil.virtual_memory().available, "of memory are free here", num_engines


def _gpu_bytes() -> list[int]:
    """Memory of each visible NVIDIA GPU. Raises `ConfigError` where their driver hangs."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        answer, _ = asked.communicate(timeout=SECONDS_FOR_GPUS)
    except subprocess.TimeoutExpired:
        asked.kill()  # and not waited for: what hangs in the driver may not end
        raise ConfigError(
            f"nvidia-smi does not answer within {SECONDS_FOR_GPUS:.0f} s, so a GPU or its driver "
            "hangs: the kernel's log (`dmesg`) says which; restart the machine"
        ) from None
    lines = answer.split() if asked.returncode == 0 else []
    return [int(line) << 20 for line in lines if line.isdigit()]
