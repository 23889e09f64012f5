"""Llama, Qwen2 and Qwen3: RMS norms, rotary positions, SwiGLU; biases and query and key norms tell them apart."""

from __future__ import annotations

from functools import partial
from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import (
    RMS_NAMES,
    SWIGLU,
    Family,
    Move,
    activation,
    given,
    layer_kinds,
    require,
    same,
    taken,
)
from subquad.models.config import DecoderConfig

_NAMES = RMS_NAMES | {"ff_dim": "intermediate_size"}


def _shared(config: Any) -> dict[str, Any]:
    """Return the settings that all three families name alike."""
    return {
        **taken(config, _NAMES),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "norm": "rms",
        "feedforward": activation(config, "hidden_act", SWIGLU),
        "position": "rope",
        "attention_dropout": float(config.attention_dropout or 0.0),
        **rope.read(config),
    }


def _llama_settings(config: Any) -> dict[str, Any]:
    require(config, pretraining_tp=(1, None))
    bias = config.attention_bias
    return {**_shared(config), "qkv_bias": bias, "out_bias": bias, "ff_bias": config.mlp_bias}


def _qwen_settings(config: Any, *, three: bool) -> dict[str, Any]:
    require(config, use_sliding_window=False)
    layer_kinds(config, {"full_attention": "full"})
    qkv, out = (config.attention_bias, config.attention_bias) if three else (True, False)
    return {**_shared(config), "qkv_bias": qkv, "out_bias": out, "ff_bias": False, "qk_norm": three}


def _config(config: DecoderConfig, *, family: str) -> dict[str, Any]:
    values = {**given(config, _NAMES), "hidden_act": "silu", **rope.write(config)}
    if family != "qwen2" or config.head_dim != config.dim // config.num_heads:
        values["head_dim"] = config.head_dim
    if family != "qwen2":
        values["attention_bias"] = config.qkv_bias
    if family == "llama":
        values["mlp_bias"] = config.ff_bias
    return values


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [same("model.embed_tokens.weight", "embedding.tokens.weight"), same("model.norm.weight", "norm.weight")]
    biases = {"qkv": config.qkv_bias, "out": config.out_bias, "ff": config.ff_bias}
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        moves += [
            same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight"),
            same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feedforward_norm.weight"),
        ]
        linear = [
            ("self_attn.q_proj", "attention.query", "qkv"),
            ("self_attn.k_proj", "attention.key", "qkv"),
            ("self_attn.v_proj", "attention.value", "qkv"),
            ("self_attn.o_proj", "attention.out", "out"),
            ("mlp.gate_proj", "feedforward.gate", "ff"),
            ("mlp.up_proj", "feedforward.up", "ff"),
            ("mlp.down_proj", "feedforward.down", "ff"),
        ]
        for their_name, our_name, place in linear:
            for kind in ("weight", "bias") if biases[place] else ("weight",):
                moves.append(same(f"{theirs}.{their_name}.{kind}", f"{ours}.{our_name}.{kind}"))
        if config.qk_norm:
            moves += [
                same(f"{theirs}.self_attn.q_norm.weight", f"{ours}.attention.query_norm.weight"),
                same(f"{theirs}.self_attn.k_norm.weight", f"{ours}.attention.key_norm.weight"),
            ]
    return moves


LLAMA = Family(
    name="llama",
    model="LlamaForCausalLM",
    settings=_llama_settings,
    config=partial(_config, family="llama"),
    moves=_moves,
)
QWEN2 = Family(
    name="qwen2",
    model="Qwen2ForCausalLM",
    settings=partial(_qwen_settings, three=False),
    config=partial(_config, family="qwen2"),
    moves=_moves,
)
QWEN3 = Family(
    name="qwen3",
    model="Qwen3ForCausalLM",
    settings=partial(_qwen_settings, three=True),
    config=partial(_config, family="qwen3"),
    moves=_moves,
)
