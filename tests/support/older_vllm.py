"""What an older release of vLLM, among those the project was run on, does by itself, and which one
is installed."""

from __future__ import annotations

from serving.vllm import names

VERSION = names.engine_version().split()[-1]
INSTALLED = next(iter(names.TESTED_VERSIONS))
IS_0_31 = VERSION == "0.31.0"
MIXES_LOGPROBS = IS_0_31
"""Beside a request with `logprob_token_ids`, others get the log-probabilities of its tokens in
steps that verify nothing; without speculation in all steps."""
KEEPS_TOKENS_BEHIND_STOP_STRINGS = IS_0_31
"""Where a step brings several tokens."""
