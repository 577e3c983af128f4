"""EAGLE-3 heads as files: what their `config.json` says, and which tensors they hold. No torch.

Three tools make them, in two forms, and vLLM serves both:

    EAGLE, SpecForge   Llama's keys beside `draft_vocab_size`;     tensors `midlayer.*`, `fc`, ...
    speculators        Llama's keys in `transformer_layer_config`; tensors `layers.0.*`, `fc`, ...

A head is one decoder layer over the target's hidden states (arXiv 2503.01840):

    taps of the target ─► fc ─┐
    embedding of next token ──┴► layer ─► norm ─► lm_head over the draft vocabulary ─► d2t ─► token

Legend: H hidden size of the head, F of its feed-forward, A attention heads x head size, D draft
vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from osd.errors import ConfigError
from osd.models.compatibility import LAYER_OF_A_HEAD, read_config
from osd.models.heads import is_parallel

Form = Literal["specforge", "speculators"]
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
"""As SpecForge, vLLM and speculators name a head of one Llama layer. Heads of speculators are known
by their `speculators_model_type`."""
LAYER = LAYER_OF_A_HEAD
TAPS = "eagle_aux_hidden_state_layer_ids"
D2T, T2D, EMBEDDING, LM_HEAD = "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"
MAPS = (D2T, T2D)
"""Tensors that map the draft vocabulary to the target's. They stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """A head as its `config.json` describes it.

    Example:
        HeadSpec(form="specforge", layer={"hidden_size": 4096, ...}, hidden_size=4096,
                 target_hidden_size=4096, vocab_size=128256, draft_vocab_size=32000,
                 taps=(2, 16, 29), norm_before_residual=False, norm_before_fc=False,
                 has_fc_norm=False, norm_output=False)
    """

    form: Form
    layer: Mapping[str, Any]
    """The keys of a Llama configuration: sizes, rotary embedding, epsilon."""
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Tokens of the target."""
    draft_vocab_size: int
    taps: tuple[int, ...]
    """Layers of the target before which its hidden states are read (transformers'
    `hidden_states[L]`); () = vLLM's default, `default_taps`."""
    norm_before_residual: bool
    """Whether the residual starts after the norm of the hidden states, not before it."""
    norm_before_fc: bool
    """One norm over all taps before `fc`."""
    has_fc_norm: bool
    """A norm of its own for each tap."""
    norm_output: bool
    """Whether the next draft token sees the normed hidden state, not the one before the norm."""

    @property
    def num_taps(self) -> int:
        return len(self.taps) or 3

    def taps_in(self, num_layers: int) -> tuple[int, ...]:
        """The taps in a target of so many layers, ascending, as the engine concatenates them."""
        return tuple(sorted(set(self.taps))) or default_taps(num_layers)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What vLLM reads where the head names no layers (its
    `get_eagle3_default_aux_hidden_state_layers`).

    Example:
        default_taps(8) == (2, 4, 5)
    """
    return 2, num_layers // 2, num_layers - 3


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes an EAGLE-3 head that is served: one Llama layer."""
    named = config.get("architectures")
    names = {str(name) for name in named} if isinstance(named, list) else set()
    if is_parallel(config):
        return False
    if (kind := config.get("speculators_model_type")) is not None:
        return bool(kind == "eagle3")
    # EAGLE's own heads have the name of a whole model.
    is_eagles_own = names == {"LlamaForCausalLM"} and "draft_vocab_size" in config
    return is_eagles_own or bool(names & set(ARCHITECTURES[:2]))


def read_spec(directory: Path) -> HeadSpec:
    """The head in a directory. Raises `ConfigError` where a key is missing or is not served."""
    return spec_of(read_config(directory), directory)


def spec_of(config: Mapping[str, Any], where: Path) -> HeadSpec:
    """The head that a `config.json` describes. Raises `ConfigError` as `read_spec` does."""
    form: Form = "speculators" if LAYER in config else "specforge"
    layer: Mapping[str, Any] = config[LAYER] if form == "speculators" else config
    eagle = config.get("eagle_config") or {}
    _check_layer(layer, where)
    hidden, num_tokens = (number(layer, key, where) for key in ("hidden_size", "vocab_size"))
    for key in ("num_attention_heads", "intermediate_size"):
        number(layer, key, where)
    for key in ("head_dim", "num_key_value_heads", "max_position_embeddings"):
        number(layer, key, where, usual=1)
    for key in ("rms_norm_eps", "rope_theta"):
        _check_positive(layer, key, where)
    _flag(layer, "attention_bias", False, where)
    taps, of_eagle = _taps(config, where), _taps(eagle, where)
    return HeadSpec(
        form=form,
        layer=layer,
        hidden_size=hidden,
        target_hidden_size=number(config, "target_hidden_size", where, usual=hidden),
        vocab_size=num_tokens,
        draft_vocab_size=number(config, "draft_vocab_size", where, usual=num_tokens),
        taps=taps or of_eagle,
        # vLLM takes True where a head of speculators does not say.
        norm_before_residual=_flag(config, "norm_before_residual", form == "speculators", where),
        norm_before_fc=_flag({**config, **eagle}, "norm_before_fc", False, where),
        has_fc_norm=_flag(config, "fc_norm", False, where),
        norm_output=_flag(config, "norm_output", False, where),
    )


def _check_layer(layer: Mapping[str, Any], where: Path) -> None:
    kind, num = layer.get("model_type", "llama"), layer.get("num_hidden_layers", 1)
    if kind != "llama" or num != 1:
        raise ConfigError(
            f"serving.draft={where}: is an EAGLE-3 head of {num} {kind} layer(s), and only heads "
            "of one Llama layer are served; use such a head, or a draft model"
        )


def number(config: Mapping[str, Any], key: str, where: Path, usual: int = 0) -> int:
    """A whole number above 0 of a `config.json`. `usual`: where it has none; 0 = it must. Raises
    `ConfigError`."""
    value = config.get(key) or usual
    if type(value) is int and value > 0:
        return value
    if not value:
        raise ConfigError(
            f"{where / 'config.json'}: has no {key}; give a head as SpecForge or speculators save "
            "it"
        )
    raise ConfigError(
        f"{where / 'config.json'}: {key} is {value!r}, and must be a whole number above 0; "
        "correct it"
    )


def _check_positive(config: Mapping[str, Any], key: str, where: Path) -> None:
    value = config.get(key)
    if value is not None and not (type(value) in (int, float) and 0 < value < float("inf")):
        raise ConfigError(
            f"{where / 'config.json'}: {key} is {value!r}, and must be a number above 0; correct it"
        )


def _flag(config: Mapping[str, Any], key: str, usual: bool, where: Path) -> bool:
    value = usual if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise ConfigError(
            f"{where / 'config.json'}: {key} is {value!r}, and must be true or false; correct it"
        )
    return value


def _taps(config: Mapping[str, Any], where: Path) -> tuple[int, ...]:
    value = config.get(TAPS) or ()
    if not isinstance(value, list | tuple) or not all(type(layer) is int for layer in value):
        raise ConfigError(
            f"{where / 'config.json'}: {TAPS} is {value!r}, and must be a list of layers of the "
            "target; correct it"
        )
    return tuple(value)


def canonical(name: str) -> str:
    """A tensor's name in the trainer and the engine, from its name in either form.

    Example:
        canonical("midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    """
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of each tensor that a head must hold. `embed_tokens.weight` [V, H],
    `d2t` int64 [D] and `t2d` bool [V] may stand beside them; without `d2t` D must be V."""
    size, num_heads = spec.hidden_size, int(spec.layer["num_attention_heads"])
    head = int(spec.layer.get("head_dim") or size // num_heads)
    queries, inner = num_heads * head, int(spec.layer["intermediate_size"])
    keys = int(spec.layer.get("num_key_value_heads") or num_heads) * head
    taps = spec.target_hidden_size * spec.num_taps
    layer = {
        "self_attn.q_proj.weight": (queries, 2 * size),
        "self_attn.k_proj.weight": (keys, 2 * size),
        "self_attn.v_proj.weight": (keys, 2 * size),
        "self_attn.o_proj.weight": (size, queries),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "hidden_norm.weight": (size,),
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
    }
    if spec.layer.get("attention_bias"):
        layer |= {
            f"self_attn.{p}_proj.bias": (n,)
            for p, n in zip("qkvo", (queries, keys, keys, size), strict=True)
        }
    found = {f"layers.0.{name}": shape for name, shape in layer.items()}
    found |= {"fc.weight": (size, taps), "norm.weight": (size,)}
    found[LM_HEAD] = (spec.draft_vocab_size, size)
    if spec.norm_before_fc:
        found["input_norm.weight"] = (taps,)
    if spec.has_fc_norm:
        norm = (spec.target_hidden_size,)
        found |= {f"fc_norm.{tap}.weight": norm for tap in range(spec.num_taps)}
    return found
