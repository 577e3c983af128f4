"""The first release of a head: one safetensors file that says what the head said, from any format.

Also what it costs, what it is called, and how it is fetched.
"""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from osd.config.schema import Config
from osd.errors import ConfigError
from osd.models import eagle3, resolve
from osd.models.draft_cost import draft_cost
from osd.models.fit import check_fit
from osd.models.vocab_padding import write_fitting
from osd.releases.store import ReleaseStore
from osd.service.plan import first_release
from tests.support.heads import embedding_of, write_head
from tests.support.pairs import VOCABULARY
from tests.support.served_targets import served_target

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_target(tmp_path_factory.mktemp("models") / "target")


def mixed(head: Path) -> Tensors:
    """Give the head weights in several types."""
    tensors = load_file(head / "model.safetensors")
    for name, dtype in (("fc.weight", torch.bfloat16), ("lm_head.weight", torch.float16)):
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    return tensors


def in_shards(head: Path, tensors: Tensors) -> None:
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, head / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled(head: Path, tensors: Tensors) -> None:
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin")


def pickled_as_long_ago(head: Path, tensors: Tensors) -> None:
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def pickled_in_shards(head: Path, tensors: Tensors) -> None:
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, head / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (head / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


FORMATS = {
    "one file": lambda head, tensors: None,
    "shards": in_shards,
    "pickled": pickled,
    "pickled long ago": pickled_as_long_ago,
    "pickled in shards": pickled_in_shards,
}


@pytest.mark.parametrize("form", ["specforge", "speculators"])
@pytest.mark.parametrize("stored", list(FORMATS))
def test_the_first_release_holds_what_the_head_holds(
    target: Path, tmp_path: Path, form: eagle3.Form, stored: str
) -> None:
    head = write_head(tmp_path / "head", target, form=form, draft_vocab_size=40)
    tensors = mixed(head)
    FORMATS[stored](head, tensors)
    assert check_fit(target, head) == VOCABULARY
    config = Config(data_dir=str(tmp_path / "data"))
    release = first_release(config, head, "target-a", VOCABULARY)
    found = load_file(Path(release.path) / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert {path.name for path in Path(release.path).iterdir()} == {
        "config.json",
        "model.safetensors",
        "release.json",
    }
    written = (Path(release.path) / "config.json").read_bytes()
    assert written == (head / "config.json").read_bytes()
    ReleaseStore(config.releases_path).verify(release)
    assert first_release(config, head, "target-a", VOCABULARY) == release


def test_a_view_of_a_larger_tensor_is_written_as_what_it_shows(
    target: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", target)
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    pickled(head, tensors)
    (tmp_path / "fitted").mkdir()
    write_fitting(head, tmp_path / "fitted", VOCABULARY)
    found = load_file(tmp_path / "fitted" / "model.safetensors")
    assert torch.equal(found["fc.weight"], tensors["fc.weight"])


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code of the file ran')",)


def test_what_is_no_weight_is_not_unpickled(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target)
    (head / "model.safetensors").unlink()
    file = head / "pytorch_model.bin"
    torch.save({"fc.weight": Harmful()}, file)
    with pytest.raises(
        ConfigError, match=r"pytorch_model.bin: not weights that can be read \("
    ) as e:
        check_fit(target, head)
    assert "\n" not in str(e.value)
    torch.save({"fc.weight": "text"}, file)
    with pytest.raises(ConfigError, match="fc.weight is str, not a tensor that can be read"):
        check_fit(target, head)
    torch.save({"fc.weight": torch.ones(2, dtype=torch.complex64)}, file)
    with pytest.raises(ConfigError, match=r"fc.weight is torch.complex64, not a tensor"):
        check_fit(target, head)


@pytest.mark.parametrize("stored", ["pickled", "pickled long ago"])
def test_a_pickled_head_that_was_cut_off_is_said(target: Path, tmp_path: Path, stored: str) -> None:
    head = write_head(tmp_path, target)
    FORMATS[stored](head, load_file(head / "model.safetensors"))
    file = head / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ConfigError, match="not weights that can be read") as caught:
        check_fit(target, head)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_of_a_pickled_head_is_named(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path, target)
    pickled_in_shards(head, load_file(head / "model.safetensors"))
    (head / "pytorch_model-2.bin").unlink()
    with pytest.raises(ConfigError, match="pytorch_model-2.bin is missing; copy the draft again"):
        check_fit(target, head)


def test_pickled_heads_with_other_weights_are_told_apart(target: Path, tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        head = write_head(tmp_path / str(seed), target, seed=seed)
        pickled(head, load_file(head / "model.safetensors"))
        found.append(resolve.fingerprint(head))
    assert found[0] != found[1]


def test_a_head_costs_one_layer_and_what_it_does_not_share(target: Path, tmp_path: Path) -> None:
    plain = draft_cost(target, write_head(tmp_path / "0", target, draft_vocab_size=40), {})
    assert plain.target_kv == 8 * plain.draft_kv == 8 * 2 * 16 * 2
    spec = eagle3.read_spec(tmp_path / "0")
    numbers = sum(int(torch.tensor(shape).prod()) for shape in eagle3.shapes(spec).values())
    assert plain.weights == 2 * numbers + 8 * 40
    assert draft_cost(target, write_head(tmp_path / "1", target), {}).weights > plain.weights
    form: eagle3.Form = "speculators"
    copied = write_head(tmp_path / "2", target, form=form, draft_vocab_size=40)
    assert draft_cost(target, copied, {}) == plain
    tensors = load_file(copied / "model.safetensors")
    assert torch.equal(tensors[eagle3.EMBEDDING], embedding_of(target))
    tensors[eagle3.EMBEDDING][0, 0] += 1
    save_file(tensors, copied / "model.safetensors")
    assert draft_cost(target, copied, {}).weights == plain.weights + 2 * VOCABULARY * 32


class Hub:
    """Gives a repository's files by their patterns, as the hub does."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache
        self.asked: list[list[str]] = []

    def snapshot_download(self, name: str, *, allow_patterns: list[str]) -> str:
        self.asked.append(allow_patterns)
        self.cache.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in self.repository.glob(pattern):
                (self.cache / file.name).write_bytes(file.read_bytes())
        return str(self.cache)


@pytest.mark.parametrize("stored", ["one file", "pickled", "pickled in shards"])
def test_a_head_of_the_hub_comes_with_its_weights_in_either_format(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    head = write_head(tmp_path / "head", target)
    FORMATS[stored](head, load_file(head / "model.safetensors"))
    hub = Hub(head, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert check_fit(target, resolve.resolve("owner/head", "serving.draft")) == VOCABULARY
    assert len(hub.asked) == (1 if stored == "one file" else 2)


def test_a_whole_model_of_the_hub_comes_as_safetensors_alone(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((target / "config.json").read_bytes())
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    hub = Hub(tmp_path / "model", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    found = resolve.resolve("owner/model", "serving.draft")
    assert [file.name for file in found.iterdir()] == ["config.json"]


def test_what_the_hub_does_not_give_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, **_: object) -> str:
        raise OSError(f"401 Client Error: {name} is gated\nmore of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError) as told:
        resolve.resolve("owner/head", "serving.draft")
    assert str(told.value) == (
        "serving.draft=owner/head: no such directory, and the hub does not give it (401 Client "
        "Error: owner/head is gated); correct the name, set HF_TOKEN where the model is gated, or "
        "give a directory"
    )


def test_a_head_and_a_draft_model_do_not_share_a_line_of_releases(
    target: Path, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", target)
    config = Config(data_dir=str(tmp_path / "data"))
    first_release(config, head, "target-a", VOCABULARY)
    with pytest.raises(ConfigError) as caught:
        first_release(config, target, "target-a", VOCABULARY)
    assert str(caught.value) == (
        f"serving.draft={target}: is a draft model, and v1, which serves this target, is a head; "
        "to begin with it, name another deployment=NAME (or data_dir=DIRECTORY)"
    )
    # Another target has a line of its own.
    assert first_release(config, target, "target-b", VOCABULARY).version == 2
    with pytest.raises(ConfigError, match="is a head, and v2, which serves this target, is a dra"):
        first_release(config, head, "target-b", VOCABULARY)
