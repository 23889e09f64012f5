"""Granite 4 without experts: Mamba-2 and full attention by layer, SwiGLU in one matrix, scaled branches and logits."""

from __future__ import annotations

import math
from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import Family, Move, activation, layer_kinds, mixer, require, same, stacked
from subquad.hf.families.mamba2 import mixer_moves, step_limits
from subquad.models.config import DecoderConfig

_KINDS = {"linear_attention": "mamba2", "full_attention": "full"}


def _settings(config: Any) -> dict[str, Any]:
    require(
        config,
        num_local_experts=0,
        mamba_conv_bias=True,
        position_embedding_type=("nope", None, "rope"),
        head_dim=config.hidden_size // config.num_attention_heads,
    )
    scale = float(config.attention_multiplier)
    usual = scale == 1 / math.sqrt(config.hidden_size // config.num_attention_heads)
    rotary = config.position_embedding_type == "rope"
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "attention": layer_kinds(config, _KINDS),
        "options": {
            "full": {"score_scale": None if usual else scale, "bias": config.attention_bias},
            "mamba2": {
                "num_heads": config.mamba_n_heads,
                "state_channels": config.mamba_d_state,
                "expand": config.mamba_expand,
                "groups": config.mamba_n_groups,
                "convolution": config.mamba_d_conv,
                "step_limits": step_limits(config.time_step_limit),
                "norm_eps": config.rms_norm_eps,
                "bias": config.mamba_proj_bias,
            },
        },
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "feedforward": activation(config, "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
        "ff_dim": config.shared_intermediate_size,
        "position": "rope" if rotary else "none",
        "max_positions": config.max_position_embeddings,
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_divisor": float(config.logits_scaling),
        "attention_dropout": float(config.attention_dropout or 0.0),
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
        **(rope.read(config) if rotary else {}),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    full, mamba = mixer(config, "full"), mixer(config, "mamba2")
    kinds = {ours: theirs for theirs, ours in _KINDS.items()}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "layer_types": [kinds[name] for name in config.layer_mechanisms],
        "num_local_experts": 0,
        "shared_intermediate_size": config.ff_dim,
        "rms_norm_eps": config.norm_eps,
        "position_embedding_type": "rope" if config.position == "rope" else "nope",
        "max_position_embeddings": config.max_positions,
        "attention_bias": full.bias,
        "attention_multiplier": full.score_scale or 1 / math.sqrt(full.channels),
        "attention_dropout": config.attention_dropout,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.values,
        "mamba_d_state": mamba.state_channels,
        "mamba_expand": mamba.expand,
        "mamba_n_groups": mamba.groups,
        "mamba_d_conv": mamba.convolution,
        "mamba_proj_bias": mamba.bias,
        "time_step_limit": mamba.step_limits or (0.0, math.inf),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **(rope.write(config) if config.position == "rope" else {}),
    }


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [same("model.embed_tokens.weight", "embedding.tokens.weight"), same("model.norm.weight", "norm.weight")]
    for i, name in enumerate(config.layer_mechanisms):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        gate_up = [f"{ours}.feedforward.gate.weight", f"{ours}.feedforward.up.weight"]
        moves += [
            same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight"),
            same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feedforward_norm.weight"),
            stacked(f"{theirs}.shared_mlp.input_linear.weight", gate_up),
            same(f"{theirs}.shared_mlp.output_linear.weight", f"{ours}.feedforward.down.weight"),
        ]
        if name == "mamba2":
            moves += mixer_moves(config, f"{theirs}.mamba", f"{ours}.attention")
            continue
        for letter, part in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
            for kind in ("weight", "bias") if mixer(config, "full").bias else ("weight",):
                moves.append(same(f"{theirs}.self_attn.{letter}_proj.{kind}", f"{ours}.attention.{part}.{kind}"))
    return moves


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    model="GraniteMoeHybridForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("full", "mamba2"),
)
