"""vLLM's V2 model runner on a CPU: its Triton kernels, run by Triton's own interpreter.

Asked for as vLLM and Triton ask: VLLM_USE_V2_MODEL_RUNNER=1 and TRITON_INTERPRET=1 in the
environment, before vLLM is imported. The kernels are the real ones but for top-k and
top-p, which vLLM then applies as without Triton, and a function of CUDA's libdevice, which is
written out. A step takes about 0.1 s a request.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TRITON = Path(sys.prefix) / "triton"
"""Where scripts/setup_tests.sh puts Triton. A folder of its own: vLLM and torch look for Triton
wherever it can be imported, and on a CPU nobody has it who only serves."""
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def is_asked_for() -> bool:
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def take() -> None:
    """Let this process's vLLM run on the interpreter. Raises as `find`."""
    if str(TRITON) not in sys.path:
        find()
        leave_out()


def find() -> None:
    """Let this process's vLLM find Triton, with a backend for CPUs.

    Raises:
        RuntimeError: Triton is not installed, or vLLM was imported before.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM was imported before and has settled that there is no Triton")
    if not (TRITON / "triton").is_dir():
        raise RuntimeError(f"{TRITON} is missing: scripts/setup_tests.sh installs Triton there")
    sys.path.append(str(TRITON))
    from triton import backends

    class Inactive:
        @staticmethod
        def is_active() -> bool:
            return False

    # vLLM's CPU build asks for a backend of this name. The interpreter never calls it.
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Inactive)


def leave_out() -> None:
    """What the interpreter cannot run: the kernel of top-k and top-p, and libdevice, whose log1p
    verifies sampled drafts. Once vLLM is imported, and before its model runner is."""
    from vllm import triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    def log1p(x: Any) -> Any:
        return triton_utils.tl.log(1.0 + x)

    topk_topp_sampler.HAS_TRITON = False
    triton_utils.tldevice = SimpleNamespace(log1p=log1p)


def leave() -> None:
    """In a new process, before vLLM is imported: the V1 runner, as where there is no Triton."""
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    if str(TRITON) in sys.path:
        sys.path.remove(str(TRITON))
