"""The whole configuration: one strict typed tree, and how it is read.

Precedence: command line flags > overrides (`section.key=value`) > environment (`OSD_SECTION__KEY`) > file > defaults.
An unknown key fails wherever it stands. The text under a field is its documentation (`docs/configuration.md` is
made from it).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from osd.errors import ConfigError

OWNED_VLLM_KEYS = {
    "model": "serving.target",
    "speculative_config": "serving.draft and serving.num_speculative_tokens",
    "served_model_name": "serving.served_model_name",
    "host": "serving.host",
    "port": "serving.port",
    "worker_extension_cls": "nothing: the service sets it",
    "worker_cls": "nothing: the service relies on vLLM's own worker",
    "scheduler_cls": "nothing: the service relies on vLLM's own scheduler",
    "middleware": "nothing: the service sets it",
    "enable_ssl_refresh": "a restart to load new certificates",
    "root_path": "nothing: the service does not sit behind a path",
    "data_parallel_size": "nothing: one engine per service",
    "tensor_parallel_size": "nothing: an engine is one worker for now",
    "pipeline_parallel_size": "nothing: an engine is one worker for now",
    "api_server_count": "nothing: one API process per engine",
}
"""vLLM arguments that belong to us, and what to use instead."""

ENVIRONMENT_ALONE = {
    "OSD_CACHE_DIR",
    "OSD_DEBUG",
    "OSD_EXTRA",
    "OSD_PYTHON",
    "OSD_RUNTIME_DIR",
    "OSD_TOKEN",
    "OSD_URL",
    "OSD_VENV",
}
"""Variables with our prefix that are not configuration keys."""


MAPPINGS = ("serving.vllm", "serving.env")
"""Keys whose values are free mappings: what stands below them is not ours to check."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ServingConfig(_Section):
    """The target, its draft, and the OpenAI API they are served on."""

    target: str = ""
    """Directory or hub name of the target model. "tiny" = the small model the project builds itself."""
    draft: str = ""
    """Directory or hub name of the draft to start with. "tiny" = the small draft the project builds itself."""
    served_model_name: str = ""
    """Name clients use for the model; empty = the target as given."""
    num_speculative_tokens: int = Field(4, ge=1, le=16)
    """Draft tokens proposed per step (k)."""
    host: str = "127.0.0.1"
    """Address of the service port. 0.0.0.0 opens it to the network."""
    port: int = Field(8000, ge=0, le=65535)
    """Service port: vLLM's OpenAI API. 0 = any free one."""
    seconds_between_polls: float = Field(0.25, gt=0)
    """How often a replica looks for a newer draft and reports its counters."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for the engine with Ray (0.7 of one leaves room for the trainer). 0 = none is reserved; a
    vLLM built for GPUs still uses those it sees."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engine's processes (`OMP_NUM_THREADS: "1"`)."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments handed to vLLM verbatim, under vLLM's own names (`dtype: bfloat16`)."""

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else value

    @field_validator("vllm")
    @classmethod
    def _refuse_owned_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            name = key.replace("-", "_")
            if name in OWNED_VLLM_KEYS:
                raise ValueError(f"{key} is not yours to set here; use {OWNED_VLLM_KEYS[name]}")
        return value


class CaptureConfig(_Section):
    """What is kept of the target's verification, and what that may cost."""

    enabled: bool = True
    """Whether traces are captured at all. Off = a plain server with a frozen draft."""
    top_k: int = Field(64, ge=1, le=1024)
    """Target log-probabilities kept per row; the rest of the mass is one number."""
    accepted_fraction: float = Field(0.25, ge=0, le=1)
    """Probability with which a row whose draft token was accepted is kept. They anchor the draft to what it knows."""
    plain_fraction: float = Field(0.25, ge=0, le=1)
    """Probability with which a row without a proposal (first token, bonus token) is kept."""
    max_context: int = Field(2048, ge=16)
    """Prompt tokens kept per trace, counted from the end."""
    max_output: int = Field(2048, ge=16)
    """A request's trace is closed after so many output tokens."""
    max_bytes_per_second: int = Field(8 << 20, ge=0)
    """Budget for traces leaving one worker; what exceeds it is dropped and counted."""
    queue_size: int = Field(512, ge=1)
    """Engine steps waiting for the capture thread; when full, steps are dropped and counted."""


class BufferConfig(_Section):
    """The replay buffer between serving and training."""

    redis_url: str = ""
    """A Redis (7 or later) or Valkey to use. Empty = a private Valkey server, started and stopped with the service."""
    max_traces: int = Field(20_000, ge=16)
    """Traces kept per draft and domain; the oldest leave first."""
    max_domains: int = Field(16, ge=1)
    """Traffic labels told apart; traces of further ones count as unlabelled."""
    max_memory: int = Field(512 << 20, ge=16 << 20)
    """Memory limit of the private Valkey server in bytes."""


class TrainerConfig(_Section):
    """How the draft is distilled."""

    enabled: bool = True
    """Off = serve and capture, but never train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the draft is trained; auto = a GPU where one is visible."""
    num_gpus: float = Field(0, ge=0)
    """GPUs reserved for the trainer with Ray. 0 = none is reserved; `trainer.device` says what it runs on."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the trainer. The draft's own weights stay float32 while training."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of the trainer."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(8, ge=0)
    """Steps over which each round's learning rate rises from zero."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm clip."""
    batch_size: int = Field(8, ge=1)
    """Traces per step."""
    max_length: int = Field(1024, ge=16)
    """Tokens per trace in training; longer ones lose the start of their prompt."""
    min_new_traces: int = Field(32, ge=1)
    """A round starts when so many traces have arrived since the last one."""
    max_new_traces: int = Field(512, ge=1)
    """New traces used in one round; of more, only the newest."""
    replay_batches: int = Field(4, ge=0)
    """Older batches replayed for every batch of new traces. Replay keeps the draft from forgetting."""
    seed: int = 0
    """Seed of sampling in the trainer."""


class GateConfig(_Section):
    """What a candidate must show before it serves, and what makes a serving draft go back."""

    min_holdout_traces: int = Field(8, ge=2)
    """Held-out traces needed to judge at all."""
    max_holdout_traces: int = Field(64, ge=2)
    """Newest held-out traces a candidate is judged on."""
    confidence: float = Field(0.9, gt=0.5, lt=1)
    """The candidate must be better with this (one-sided) confidence, by paired bootstrap over requests."""
    min_gain: float = Field(0.0, ge=0, lt=1)
    """Gain in α that the lower bound must exceed."""
    num_bootstrap: int = Field(500, ge=100)
    """Bootstrap resamples."""
    rollback_margin: float = Field(0.1, gt=0, lt=1)
    """A new draft is rolled back when the α it serves with stays this far under what the gate measured, and the draft
    before it does better on the same recent requests."""
    rollback_min_tested: int = Field(400, ge=1)
    """Draft tokens tested live before a new draft is judged on them."""


class ControlConfig(_Section):
    """The control port: dashboard, status, metrics, administration."""

    host: str = "127.0.0.1"
    """Address of the control port."""
    port: int = Field(8001, ge=0, le=65535)
    """Control port. 0 = any free one."""
    seconds_between_looks: float = Field(0.5, gt=0)
    """Pause between two looks of the watch loop."""
    history_seconds: int = Field(24 * 3600, ge=60)
    """How much history the dashboard keeps."""


class ReleasesConfig(_Section):
    """The store of drafts on disk."""

    dir: str = ""
    """Where releases are kept; empty = `releases` under the data directory."""
    keep: int = Field(8, ge=2)
    """Newest releases kept; pinned, serving and first ones are never pruned."""


class RayConfig(_Section):
    """The Ray cluster the service runs on."""

    address: str = "local"
    """"local" = a private one, started and stopped with the service; "auto" or an address = an existing cluster."""
    trainer_resource: str = ""
    """Custom Ray resource of the machine the trainer runs on; empty = the machine the service was started on. Another
    machine needs the data directory on a shared file system and a `buffer.redis_url` both reach."""


class Config(_Section):
    """Everything the service can be told."""

    deployment: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Name of this deployment: keeps its data, Redis keys and actors apart from others."""
    data_dir: str = ""
    """Where releases, checkpoints and the private Valkey's file live; empty = `~/.local/share/osd/DEPLOYMENT`."""
    serving: ServingConfig = ServingConfig()
    capture: CaptureConfig = CaptureConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    gate: GateConfig = GateConfig()
    control: ControlConfig = ControlConfig()
    releases: ReleasesConfig = ReleasesConfig()
    ray: RayConfig = RayConfig()

    @property
    def data_path(self) -> Path:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(self.data_dir or f"{base}/osd/{self.deployment}").expanduser().resolve()

    @property
    def releases_path(self) -> Path:
        return Path(self.releases.dir).expanduser().resolve() if self.releases.dir else self.data_path / "releases"

    @property
    def checkpoint_path(self) -> Path:
        return self.data_path / "trainer"


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for each key (`serving.port`), where its value came from."""

    config: Config
    origins: dict[str, str]


def load(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Read a configuration. `overrides` are `section.key=value` with YAML values; `flags` are dotted keys.

    Raises `ConfigError` naming the key, its origin, the value and what would fit.
    """
    values: dict[str, tuple[Any, str]] = {}
    if path is not None:
        values |= {key: (value, str(path)) for key, value in _read_file(Path(path)).items()}
    for key, value in _read_environment(os.environ if environ is None else environ).items():
        values[key] = (value, f"environment variable {_variable_name(key)}")
    for text in overrides:
        key, value = _parse_override(text)
        values[key] = (value, "command line")
    values |= {key: (value, "command line") for key, value in (flags or {}).items() if value is not None}
    origins = {key: origin for key, (_, origin) in values.items()}
    try:
        config = Config.model_validate(_nest({key: value for key, (value, _) in values.items()}))
    except ValidationError as error:
        raise _first_problem(error, origins) from None
    return Resolved(config, origins)


def leaves(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of every field."""
    out: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            out |= leaves(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key there is."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(tree).__name__}")
    return _flatten(tree, str(path))


def _flatten(tree: dict[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in MAPPINGS:
            flat |= _flatten(value, where, f"{name}.")
        elif isinstance(value, dict):
            flat |= {f"{name}.{k}": v for k, v in value.items()}
        else:
            flat[name] = value
    return flat


def _variable_name(key: str) -> str:
    return "OSD_" + key.replace(".", "__").upper()


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    by_name = {_variable_name(key): key for key in known_keys()}
    out: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith("OSD_") or name in ENVIRONMENT_ALONE:
            continue
        if name.startswith("OSD_SERVING__VLLM__"):
            out["serving.vllm." + name.removeprefix("OSD_SERVING__VLLM__").lower()] = _parse_value(text)
        elif name in by_name:
            out[by_name[name]] = _parse_value(text)
        else:
            raise ConfigError(f"environment variable {name}: no such key{_suggest(name, by_name)}")
    return out


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override has the form section.key=value")
    return key.strip(), _parse_value(value)


def _parse_value(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        is_mapped = any(key.startswith(mapping + ".") for mapping in MAPPINGS)
        *parents, leaf = key.split(".", 2) if is_mapped else key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a section")
        leaf_value = node.get(leaf)
        if isinstance(leaf_value, dict) and isinstance(value, dict):
            leaf_value.update(value)
        else:
            node[leaf] = value
    return tree


PLAIN_WORDS = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_pattern_mismatch": "must be lower-case letters, digits and -, at most 32, beginning with a letter or digit",
}
"""For the validation errors whose own words are those of a library."""


def _first_problem(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    origin = origins.get(key) or next((o for k, o in origins.items() if k.startswith(key + ".")), "defaults")
    if problem["type"] == "extra_forbidden":
        given = next((k for k in origins if k.startswith(key)), key)
        return ConfigError(f"{given} ({origin}): no such key{_suggest(given, known_keys())}")
    message = PLAIN_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key}={problem['input']!r} ({origin}): {message}")


def _suggest(name: str, known: Any) -> str:
    """The likeliest meaning of a misspelt key: the leaf counts for more than the section it stands in."""
    import difflib

    def likeness(candidate: str) -> float:
        parts = [(a.rpartition(".")[2].lower(), a.lower()) for a in (name, candidate)]
        return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in zip(*parts, strict=True))

    best = max(known, key=likeness)
    return f"; did you mean {best}?" if likeness(best) > 1.5 else "; `osd config show` lists all keys"
