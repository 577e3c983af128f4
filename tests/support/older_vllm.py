"""What an older release of vLLM, among those the project was run on, does by itself."""

from __future__ import annotations

from serving.vllm import names

VERSION = names.engine_version().split()[-1].partition("+")[0]
IS_0_31 = VERSION == "0.31.0"
MIXES_LOGPROBS = IS_0_31
"""Beside a request with `logprob_token_ids`, others get the log-probabilities of its tokens in
steps that verify nothing; without speculation in all steps."""
KEEPS_TOKENS_BEHIND_STOP_STRINGS = IS_0_31
"""Where a step brings several tokens."""


def has_come_with(release: str) -> bool:
    """Whether what this release brought is there."""
    return _parts(release) <= _parts(VERSION)


def _parts(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]
