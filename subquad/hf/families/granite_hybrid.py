"""Granite 4 without experts: Mamba-2 and full attention by layer, SwiGLU in one matrix, scaled branches and logits."""

from __future__ import annotations

import math
from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.hf.families.mamba2 import mixer_moves, step_limits
from subquad.models.config import DecoderConfig

KINDS = {"linear_attention": "mamba2", "full_attention": "full"}
_MIXER = {
    "num_heads": "mamba_n_heads",
    "state_channels": "mamba_d_state",
    "expand": "mamba_expand",
    "groups": "mamba_n_groups",
    "convolution": "mamba_d_conv",
    "bias": "mamba_proj_bias",
}
_OWN = {
    "ff_dim": "shared_intermediate_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def hybrid_settings(config: Any, own: dict[str, str]) -> dict[str, Any]:
    """Return the settings but positions of Mamba-2 and full attention by layer; `own` maps our names to theirs."""
    base.require(config, mamba_conv_bias=True, head_dim=config.hidden_size // config.num_attention_heads)
    mamba = {"step_limits": step_limits(config.time_step_limit), "norm_eps": config.rms_norm_eps, "dropout": 0.0}
    return {
        **base.taken(config, base.RMS_NAMES | own),
        "attention": base.layer_kinds(config, KINDS),
        "options": {"full": {"bias": config.attention_bias}, "mamba2": base.taken(config, _MIXER) | mamba},
        "norm": "rms",
        "feedforward": base.activation(config, "hidden_act", base.SWIGLU),
        "attention_dropout": float(config.attention_dropout or 0.0),
        "position": "none",
    }


def hybrid_config(config: DecoderConfig, own: dict[str, str], *, partial: bool = False) -> dict[str, Any]:
    """Return the values of their configuration that `hybrid_settings` reads; `partial` as in `rope.write`."""
    mamba = base.mixer(config, "mamba2")
    return {
        **base.given(config, base.RMS_NAMES | own),
        **base.given(mamba, _MIXER),
        "mamba_d_head": mamba.values,
        "time_step_limit": mamba.step_limits or (0.0, math.inf),
        "attention_bias": base.mixer(config, "full").bias,
        **(rope.write(config, partial=partial) if config.position == "rope" else {}),
    }


def layer_moves(config: DecoderConfig, layer: int) -> list[Move]:
    """Return the moves of a layer's norm before its mechanism, and of its mechanism."""
    theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
    moves = base.renamed(theirs, ours, {"input_layernorm": "attention_norm"})
    if config.layer_mechanisms[layer] == "mamba2":
        return moves + mixer_moves(config, f"{theirs}mamba.", f"{ours}attention.")
    tensors = base.with_bias(base.mixer(config, "full").bias)
    return moves + base.renamed(f"{theirs}self_attn.", f"{ours}attention.", base.QUERY_KEY_VALUE | base.OUT, tensors)


def _settings(config: Any) -> dict[str, Any]:
    base.require(config, num_local_experts=0, position_embedding_type=("nope", None, "rope"))
    values, scale = hybrid_settings(config, _OWN), float(config.attention_multiplier)
    if scale != 1 / math.sqrt(config.hidden_size // config.num_attention_heads):
        values["options"]["full"]["score_scale"] = scale
    rotary = config.position_embedding_type == "rope"
    return values | ({"position": "rope", **rope.read(config)} if rotary else {})


def _config(config: DecoderConfig) -> dict[str, Any]:
    kinds, full = {ours: theirs for theirs, ours in KINDS.items()}, base.mixer(config, "full")
    return {
        **hybrid_config(config, _OWN),
        "layer_types": [kinds[name] for name in config.layer_mechanisms],
        "num_local_experts": 0,
        "position_embedding_type": "rope" if config.position == "rope" else "nope",
        "attention_multiplier": full.score_scale or 1 / math.sqrt(full.channels),
    }


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("model.", "", base.ENDS)
    own = {"post_attention_layernorm": "feedforward_norm", "shared_mlp.output_linear": "feedforward.down"}
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        gate_up = [f"{ours}feedforward.{part}.weight" for part in ("gate", "up")]
        moves += [*layer_moves(config, i), base.stacked(f"{theirs}shared_mlp.input_linear.weight", gate_up)]
        moves += base.renamed(theirs, ours, own)
    return moves


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    model="GraniteMoeHybridForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
    mechanisms=("full", "mamba2"),
)
