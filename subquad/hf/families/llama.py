"""Llama, Mistral, Ministral, Qwen2 and Qwen3: RMS norms, rotary positions, SwiGLU.

Biases, query and key norms and windows tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_NAMES = base.RMS_NAMES | {"ff_dim": "intermediate_size"}
_BIASES = {
    "llama": {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "ff_bias": "mlp_bias"},
    "qwen3": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
}
"""Settings of biases by family, ours to theirs; Qwen2 always has those of queries, keys and values."""
_KINDS = {"full_attention": "full", "sliding_attention": "window"}


def _settings(config: Any, *, family: str) -> dict[str, Any]:
    biases = {"qkv_bias": family == "qwen2", "out_bias": False, "ff_bias": False}
    if family == "mistral":  # which has no layer_types
        names = ["full" if config.sliding_window is None else "window"]
    else:
        names = ["full"] if family == "llama" else base.layer_kinds(config, _KINDS)
    return {
        **base.taken(config, _NAMES),
        **_layers(config, names),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "norm": "rms",
        "qk_norm": family == "qwen3",
        "feedforward": base.activation(config, "hidden_act", base.SWIGLU),
        "position": "rope",
        "attention_dropout": float(config.attention_dropout or 0.0),
        **biases,
        **base.taken(config, _BIASES.get(family, {})),
        **rope.read(config),
    }


def _layers(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the mechanisms of the layers, and the tokens that a window sees: theirs count the query's own too."""
    if "window" not in names:
        return {"attention": "full"}
    width = config.sliding_window
    if width is None or width < 1:
        raise ValueError(
            f"our decoder does not support {config.model_type} with layers of sliding attention and "
            f"sliding_window={width}; sliding_window must be at least 1"
        )
    return {"attention": list(names) if "full" in names else "window", "options": {"window": {"width": width}}}


def _config(config: DecoderConfig, *, family: str) -> dict[str, Any]:
    biases = _BIASES.get(family, {})
    values = {**base.given(config, _NAMES | biases), "hidden_act": "silu", **rope.write(config)}
    if family != "qwen2" or config.head_dim != config.dim // config.num_heads:
        values["head_dim"] = config.head_dim
    width = base.mixer(config, "window").width if "window" in config.mechanisms else None
    if family == "mistral" or width is not None:
        values["sliding_window"] = width
    if family in ("ministral", "qwen2", "qwen3"):
        kinds = {ours: theirs for theirs, ours in _KINDS.items()}
        values["layer_types"] = [kinds[name] for name in config.layer_mechanisms]
    if family.startswith("qwen"):
        values["use_sliding_window"] = width is not None
    return values


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("model.", "", base.ENDS)
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        moves += base.renamed(theirs, ours, base.NORMS)
        moves += base.renamed(f"{theirs}mlp.", f"{ours}feedforward.", base.GATE_UP_DOWN, base.with_bias(config.ff_bias))
        theirs, ours = f"{theirs}self_attn.", f"{ours}attention."
        moves += base.renamed(theirs, ours, base.QUERY_KEY_VALUE, base.with_bias(config.qkv_bias))
        moves += base.renamed(theirs, ours, base.OUT, base.with_bias(config.out_bias))
        if config.qk_norm:
            moves += base.renamed(theirs, ours, base.QK_NORMS)
    return moves


LLAMAS = tuple(
    Family(
        name=name,
        model=model,
        settings=partial(_settings, family=name),
        config=partial(_config, family=name),
        moves=_moves,
        mechanisms=mechanisms,
    )
    for name, model, mechanisms in (
        ("llama", "LlamaForCausalLM", ("full",)),
        ("mistral", "MistralForCausalLM", ("full", "window")),
        ("ministral", "MinistralForCausalLM", ("full", "window")),
        ("qwen2", "Qwen2ForCausalLM", ("full", "window")),
        ("qwen3", "Qwen3ForCausalLM", ("full", "window")),
    )
)
