"""Which targets and drafts fit each other.

Tokenizers are compared by the files that exist, contexts by length, weights by completeness.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.models.compatibility import check_pair, context_length, read_config
from osd.service.plan import max_model_len

WORDS = ["a", "b", "c", "d"]


def model_at(
    directory: Path, words: list[str], *, added: tuple[str, ...] = (), **config: Any
) -> Path:
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "vocab_size": len(words) + len(added), **config}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


def with_old_files(directory: Path) -> Path:
    """The same tokenizer as `vocab.json` and `added_tokens.json`."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ordinary = tokenizer.get_vocab(with_added_tokens=False)
    added = {t: i for t, i in tokenizer.get_vocab().items() if t not in ordinary}
    (directory / "vocab.json").write_text(json.dumps(ordinary))
    (directory / "added_tokens.json").write_text(json.dumps(added))
    (directory / "tokenizer.json").unlink()
    return directory


@pytest.mark.parametrize(("num_target", "num_draft"), [(4, 4), (64, 48), (48, 64)])
def test_rows_that_only_pad_may_differ(tmp_path: Path, num_target: int, num_draft: int) -> None:
    target = model_at(tmp_path / "t", WORDS, vocab_size=num_target)
    draft = model_at(tmp_path / "d", WORDS, vocab_size=num_draft)
    assert check_pair(target, draft) == num_target
    assert check_pair(target, with_old_files(draft)) == num_target


@pytest.mark.parametrize("old_files", [False, True])
def test_another_tokenizer_is_refused_with_the_first_token_that_differs(
    tmp_path: Path, old_files: bool
) -> None:
    target, draft = (
        model_at(tmp_path / "t", WORDS),
        model_at(tmp_path / "d", ["a", "b", "x", "c"], vocab_size=64),
    )
    if old_files:
        with_old_files(draft)
    with pytest.raises(ConfigError) as error:
        check_pair(target, draft)
    assert "they disagree on 'c': id 2 in the target, 3 in the draft; 3 such" in str(error.value)
    assert ("its vocab.json compared with tokenizer.json" in str(error.value)) == old_files


def test_an_added_token_may_be_missing_but_not_moved(tmp_path: Path) -> None:
    target = model_at(tmp_path / "t", WORDS, added=("<|end|>", "<|tool|>"))
    assert check_pair(target, model_at(tmp_path / "base", WORDS, added=("<|end|>",))) == 6
    with pytest.raises(
        ConfigError, match=r"disagree on '<\|end\|>': id 4 in the target, 5 in the draft"
    ):
        check_pair(target, model_at(tmp_path / "moved", WORDS, added=("<|tool|>", "<|end|>")))


def test_rows_of_real_tokens_are_not_cut_off(tmp_path: Path) -> None:
    target = model_at(tmp_path / "t", WORDS)
    draft = model_at(tmp_path / "d", WORDS, added=("<|end|>",), vocab_size=8)
    with pytest.raises(
        ConfigError, match="its tokenizer has ids up to 4, the target has rows for 4 tokens"
    ):
        check_pair(target, draft)


def test_a_sentencepiece_model_alone_is_compared_too(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    for name, line in (
        ("one", "the quick brown fox jumps over the lazy dog"),
        ("two", "sphinx of black quartz"),
    ):
        text = tmp_path / f"{name}.txt"
        text.write_text("\n".join([line] * 50))
        SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(tmp_path / name),
            vocab_size=40,
            minloglevel=2,
            hard_vocab_limit=False,
        )
    pieces = SentencePieceProcessor(model_file=str(tmp_path / "one.model"))
    words = [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]
    target, draft = model_at(tmp_path / "t", words), model_at(tmp_path / "d", words, vocab_size=64)
    (draft / "tokenizer.json").unlink()
    shutil.copyfile(tmp_path / "one.model", draft / "tokenizer.model")
    assert check_pair(target, draft) == len(words)
    shutil.copyfile(tmp_path / "two.model", draft / "tokenizer.model")
    with pytest.raises(ConfigError, match="its tokenizer.model compared with tokenizer.json"):
        check_pair(target, draft)


def test_without_a_tokenizer_only_equal_sizes_pass_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = model_at(tmp_path / "t", WORDS), model_at(tmp_path / "d", WORDS)
    (target / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert check_pair(target, draft) == 4
    assert "by its number of tokens alone (4)" in caplog.text
    with pytest.raises(
        ConfigError,
        match=r"has 8 tokens, the target 4, and .*/t holds no tokenizer.json, vocab.json",
    ):
        check_pair(target, model_at(tmp_path / "other", WORDS, vocab_size=8))


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    target, draft = model_at(tmp_path / "t", WORDS), model_at(tmp_path / "d", WORDS)
    (draft / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ConfigError, match=r"d/tokenizer.json: not a tokenizer that can be read"):
        check_pair(target, draft)


def test_a_shorter_context_than_the_target_serves_is_refused(tmp_path: Path) -> None:
    target = model_at(tmp_path / "t", WORDS, max_position_embeddings=4096)
    draft = model_at(tmp_path / "d", WORDS, max_position_embeddings=2048)
    with pytest.raises(ConfigError) as error:
        check_pair(target, draft)
    assert "has a context of 2048 tokens, the target serves 4096" in str(error.value)
    assert "set serving.vllm.max_model_len=2048" in str(error.value)
    with pytest.raises(ConfigError, match="the target serves 2049"):
        check_pair(target, draft, 2049)
    assert check_pair(target, draft, 2048) == 4
    with pytest.raises(ConfigError, match="the target serves 4096"):
        check_pair(target, draft, -1)


@pytest.mark.parametrize("key", ["max_model_len", "max-model-len"])
def test_the_served_context_is_the_one_the_engine_is_told(key: str) -> None:
    assert max_model_len(Config.model_validate({"serving": {"vllm": {key: 2048}}})) == 2048
    assert max_model_len(Config()) is None


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "n_positions": 2048}, 2048),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2.0}},
            4096,
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0},
            },
            8192,
        ),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default"}}, 8192),
        ({}, None),
    ],
)
def test_a_context_is_counted_as_vllm_counts_it(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "cannot be read (maximum recursion depth exceeded"),
        ("[]", "is no mapping"),
        ('{"text_config": "text"}', "text_config is no mapping"),
        ('{"transformer_layer_config": [1]}', "transformer_layer_config is no mapping"),
    ],
)
def test_a_configuration_that_is_none_is_named(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {why}")
    assert str(error.value).endswith("; give a model in Hugging Face format")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    target, draft = model_at(tmp_path / "t", WORDS), model_at(tmp_path / "d", WORDS)
    (draft / "model.safetensors").rename(draft / "model-00001-of-00002.safetensors")
    with pytest.raises(
        ConfigError,
        match="no model.safetensors there, nor shards with model.safetensors.index.json",
    ):
        check_pair(target, draft)
    index = {
        "weight_map": {
            "x": "model-00001-of-00002.safetensors",
            "y": "model-00002-of-00002.safetensors",
        }
    }
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing"):
        check_pair(target, draft)
