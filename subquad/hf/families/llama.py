"""Llama, Qwen2 and Qwen3: RMS norms, rotary positions, SwiGLU; biases and query and key norms tell them apart."""

from __future__ import annotations

from functools import partial
from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_NAMES = base.RMS_NAMES | {"ff_dim": "intermediate_size"}


def _shared(config: Any) -> dict[str, Any]:
    """Return the settings that all three families name alike."""
    return {
        **base.taken(config, _NAMES),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "norm": "rms",
        "feedforward": base.activation(config, "hidden_act", base.SWIGLU),
        "position": "rope",
        "attention_dropout": float(config.attention_dropout or 0.0),
        **rope.read(config),
    }


def _llama_settings(config: Any) -> dict[str, Any]:
    base.require(config, pretraining_tp=(1, None))
    bias = config.attention_bias
    return {**_shared(config), "qkv_bias": bias, "out_bias": bias, "ff_bias": config.mlp_bias}


def _qwen_settings(config: Any, *, three: bool) -> dict[str, Any]:
    base.require(config, use_sliding_window=False)
    base.layer_kinds(config, {"full_attention": "full"})
    qkv, out = (config.attention_bias, config.attention_bias) if three else (True, False)
    return {**_shared(config), "qkv_bias": qkv, "out_bias": out, "ff_bias": False, "qk_norm": three}


def _config(config: DecoderConfig, *, family: str) -> dict[str, Any]:
    values = {**base.given(config, _NAMES), "hidden_act": "silu", **rope.write(config)}
    if family != "qwen2" or config.head_dim != config.dim // config.num_heads:
        values["head_dim"] = config.head_dim
    if family != "qwen2":
        values["attention_bias"] = config.qkv_bias
    if family == "llama":
        values["mlp_bias"] = config.ff_bias
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


LLAMA, QWEN2, QWEN3 = (
    Family(name=name, model=model, settings=settings, config=partial(_config, family=name), moves=_moves)
    for name, model, settings in (
        ("llama", "LlamaForCausalLM", _llama_settings),
        ("qwen2", "Qwen2ForCausalLM", partial(_qwen_settings, three=False)),
        ("qwen3", "Qwen3ForCausalLM", partial(_qwen_settings, three=True)),
    )
)
