"""Reasons to leave something out of capture, counted in `osd_capture_skipped_total{reason}`."""

from __future__ import annotations

import zlib

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
    is_sampled = zlib.crc32(request.req_id.encode(), 1) < request_fraction * 2**32
    return "" if is_sampled else "not_sampled"
