"""Llama, Qwen2 and Qwen3: RMS norms, rotary positions, SwiGLU; biases and query and key norms tell them apart."""

from __future__ import annotations

from functools import partial
from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import Family, Move, activation, layer_kinds, require, same
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}


def _shared(config: Any) -> dict[str, Any]:
    """Return the settings that all three families name alike."""
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ff_dim": config.intermediate_size,
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "feedforward": activation(config, "hidden_act", _ACTIVATIONS),
        "position": "rope",
        "max_positions": config.max_position_embeddings,
        "attention_dropout": float(config.attention_dropout or 0.0),
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
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
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.ff_dim,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **rope.write(config),
    }
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
