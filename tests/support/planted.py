"""Requests with a planted text for every route of vLLM that leads to the engine."""

from __future__ import annotations

import json
from typing import Any

SECRET = "the planted text"
TOKENS = [71, 72, 73]

LEADS_TO_THE_ENGINE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": SECRET}]] * 2,
        "max_tokens": 4,
    },
    "/v1/responses": {"input": SECRET, "max_output_tokens": 4},
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 4,
    },
    "/v1/systemone": {"state": SECRET, "questions": {"q": {"type": "choice"}}},
    "/v1/decisions": {
        "model": "m",
        "input": SECRET,
        "questions": [{"type": "predicate", "instructions": "Is it so?"}],
    },
    "/generative_scoring": {"query": SECRET, "items": [SECRET], "label_token_ids": [1, 2]},
    "/inference/v1/generate": {"token_ids": TOKENS, "sampling_params": {"max_tokens": 4}},
    "/invocations": {"prompt": SECRET, "max_tokens": 4},
}
"""A request that each would serve."""
SINCE = {"/v1/systemone": "0.32.0", "/v1/decisions": "0.33.0"}
"""Route -> the release of vLLM that brought it. All that were run have the others."""


def ways() -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Headers and members of the body by which a request asks to be kept out."""
    off, said, yes = ({"vllm_xargs": {"osd_capture": wish}} for wish in ("no", "off", "on"))
    header = {"X-OSD-Capture": "off"}
    found = {
        "header": (header, {}),
        "body": ({}, said),
        "both": (header, off),
        "header against body": (header, yes),
    }
    found["body against header"] = ({"X-OSD-Capture": "on"}, said)
    return found | {
        f"{name}, beams": (h, b | {"use_beam_search": True, "n": 2})
        for name, (h, b) in found.items()
    }


def body_of(path: str, text: str, token_ids: list[int]) -> dict[str, Any]:
    """A request that this route would serve, with another text than the planted one."""
    found = (
        json.dumps(LEADS_TO_THE_ENGINE[path])
        .replace(SECRET, text)
        .replace(json.dumps(TOKENS), json.dumps(token_ids))
    )
    return dict(json.loads(found))
