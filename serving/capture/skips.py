"""Reasons to leave something out of capture, counted in `osd_capture_skipped_total{reason}`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.vllm.hooks import NewRequest

SKIP_REASONS = {
    "opted_out": "requests whose client asked for it (`X-OSD-Capture: off`)",
    "not_sampled": "requests beyond `capture.request_fraction`",
    "calibration": "requests with which a starting engine measures what its steps take",
    "structured_output": "requests with a grammar, whose mask is already in the logits",
    "multimodal": "requests with images or audio, which the draft's tokens do not show",
    "prompt_embeds": "requests whose prompt is not made of tokens",
    "target_adapter": (
        "requests for a LoRA adapter of the target: another distribution than the target's"
    ),
    "pooling": "requests that generate nothing (embeddings, scores)",
    "queue_full": "steps whose rows were dropped because the capture thread had too many waiting",
    "budget": "traces beyond `capture.max_bytes_per_second`",
    "gap": "traces of requests some of whose tokens were never seen",
    "hook_error": "the hook failed, and capture is off until the engine restarts",
    "assembly_error": "steps the capture thread failed on",
}
"""Every reason, and what is counted under it."""


def wants_out(capture: object) -> bool:
    """Whether this value of `X-OSD-Capture` or `vllm_xargs.osd_capture` keeps a request out:
    everything but a plain yes does."""
    return str(capture).strip().lower() not in ("on", "1", "true", "yes")


def skip_reason(request: NewRequest, request_fraction: float = 1.0) -> str:
    """Why a request must not be captured; "" when it may. The client's own wish comes first.

    `request_fraction` of the requests that may be captured are chosen by a hash of their ids.
    """
    if wants_out(request.extra_args.get("osd_capture", "on")):
        return "opted_out"
    if request.extra_args.get("osd_calibration"):
        return "calibration"
    if request.skip_reason:
        return request.skip_reason
    return "" if _is_sampled(request.req_id, request_fraction) else "not_sampled"


def unfit(data: Any) -> str:
    """Why a request's logits or tokens do not show what the target alone would say, from what vLLM
    knows of it; "" when they do."""
    if data.sampling_params.structured_outputs is not None:
        return "structured_output"  # its grammar mask is already in the logits
    if data.mm_features:
        return "multimodal"
    if data.prompt_token_ids is None or data.prompt_embeds is not None:
        return "prompt_embeds"
    if data.lora_request is not None:
        return "target_adapter"
    return ""


def may_be_kept(request: Any, extra_args: Mapping[str, Any], fraction: float) -> bool:
    """Whether a request of vLLM's scheduler may be remembered: the same that may be captured."""
    if request.sampling_params is None or wants_out(extra_args.get("osd_capture", "on")):
        return False
    return not unfit(request) and _is_sampled(request.request_id, fraction)


def _is_sampled(req_id: str, fraction: float) -> bool:
    return zlib.crc32(req_id.encode(), 1) < fraction * 2**32
