"""Which settings are not shown."""

from __future__ import annotations

import pytest

from osd.config import reading
from osd.config.secrets import without_secrets
from osd.errors import ConfigError


def test_names_that_end_like_a_secret_lose_their_values() -> None:
    secret = ["api_key", "VLLM_API_KEY", "HF_TOKEN", "ssl_keyfile_password", "AWS_SECRET", "token"]
    plain = ["max_num_batched_tokens", "tokenizer", "ssl_keyfile", "KEYS", "monkey", "num_tokens"]
    shown = without_secrets(dict.fromkeys([*secret, *plain], "s3cret"))
    assert {name for name, value in shown.items() if value == "***"} == set(secret)
    assert [*shown] == [*secret, *plain]
    assert without_secrets({"a": {"b_token": 1, "c": [2]}}) == {"a": {"b_token": "***", "c": [2]}}
    assert without_secrets("s3cret") == "s3cret"


@pytest.mark.parametrize("wrong", ["serving.vllm.host=1", "serving.vllm.tensor_parallel_size=x"])
def test_a_mistake_beside_a_secret_does_not_show_it(wrong: str) -> None:
    with pytest.raises(ConfigError) as refused:
        reading.load(overrides=["serving.vllm.api_key=s3cret", wrong], environ={})
    assert "s3cret" not in str(refused.value) and wrong.split(".")[-1].split("=")[0] in str(
        refused.value
    )
