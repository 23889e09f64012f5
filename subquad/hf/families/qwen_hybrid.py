"""Qwen3.5 (text) and Qwen3-Next without experts: Gated DeltaNet and gated full attention by layer, zero-centred norms.

The two differ in how the matrices of a Gated DeltaNet are joined.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_KINDS = {"linear_attention": "gated_delta_net", "full_attention": "full"}
_NAMES = base.RMS_NAMES | {"head_dim": "head_dim", "ff_dim": "intermediate_size"}
_MIXER = {
    "num_heads": "linear_num_value_heads",
    "key_channels": "linear_key_head_dim",
    "value_channels": "linear_value_head_dim",
    "convolution": "linear_conv_kernel_dim",
}


def _settings(config: Any) -> dict[str, Any]:
    _check_dense(config)
    delta = {**base.taken(config, _MIXER), "norm_eps": config.rms_norm_eps, "dropout": 0.0}
    if config.linear_num_key_heads != config.linear_num_value_heads:
        delta["num_key_heads"] = config.linear_num_key_heads
    return {
        **base.taken(config, _NAMES),
        "attention": base.layer_kinds(config, _KINDS),
        "options": {"full": {"output_gate": True, "bias": config.attention_bias}, "gated_delta_net": delta},
        "norm": "zero_centred_rms",
        "qk_norm": True,
        "feedforward": base.activation(config, "hidden_act", base.SWIGLU),
        "position": "rope",
        **rope.read(config, partial=True),
    }


def _check_dense(config: Any) -> None:
    """Raise `ValueError` for a layer with experts; Qwen3.5's text model of this name has none."""
    experts, every = getattr(config, "num_experts", 0), getattr(config, "decoder_sparse_step", 1)
    for i in range(config.num_hidden_layers):
        if experts > 0 and i not in config.mlp_only_layers and not (i + 1) % every:
            raise ValueError(
                f"our decoder does not support {config.model_type} with num_experts={experts} in layer {i}; "
                "num_experts must be 0, or mlp_only_layers name every layer"
            )


def _config(config: DecoderConfig, *, fused: bool) -> dict[str, Any]:
    delta, kinds = base.mixer(config, "gated_delta_net"), {ours: theirs for theirs, ours in _KINDS.items()}
    return {
        **base.given(config, _NAMES),
        **base.given(delta, _MIXER),
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.keys,
        "linear_value_head_dim": delta.values,
        "layer_types": [kinds[name] for name in config.layer_mechanisms],
        "attention_bias": base.mixer(config, "full").bias,
        **({"num_experts": 0} if fused else {}),
        **rope.write(config, partial=True),
    }


def _moves(config: DecoderConfig, *, fused: bool) -> list[Move]:
    tensors, moves = base.with_bias(base.mixer(config, "full").bias), base.renamed("model.", "", base.ENDS)
    for i, name in enumerate(config.layer_mechanisms):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        moves += base.renamed(theirs, ours, base.NORMS)
        moves += base.renamed(f"{theirs}mlp.", f"{ours}feedforward.", base.GATE_UP_DOWN)
        if name == "gated_delta_net":
            moves += _delta_moves(config, f"{theirs}linear_attn.", f"{ours}attention.", fused=fused)
            continue
        theirs, ours = f"{theirs}self_attn.", f"{ours}attention."
        for tensor in tensors:
            parts = [f"{ours}query{tensor}", f"{ours}gating{tensor}"]
            moves.append(base.stacked(f"{theirs}q_proj{tensor}", parts, heads=config.num_heads))
        others = {"k_proj": "key", "v_proj": "value"} | base.OUT
        moves += base.renamed(theirs, ours, base.QK_NORMS) + base.renamed(theirs, ours, others, tensors)
    return moves


def _delta_moves(config: DecoderConfig, theirs: str, ours: str, *, fused: bool) -> list[Move]:
    """Return the moves of one Gated DeltaNet; `fused` matrices hold the rows of one key head after another."""
    own = base.mixer(config, "gated_delta_net")
    keys, values, groups = own.keys * own.key_heads, own.values * own.num_heads, own.key_heads
    rows = {f"{ours}query.weight": keys, f"{ours}key.weight": keys, f"{ours}value.weight": values}
    if fused:
        gate, strength, fading = (f"{ours}{name}.weight" for name in ("gating", "strength", "fading"))
        moves = [
            base.parted(f"{theirs}in_proj_qkvz.weight", rows | {gate: values}, heads=groups),
            base.stacked(f"{theirs}in_proj_ba.weight", (strength, fading), heads=groups),
        ]
    else:
        moves = [base.parted(f"{theirs}in_proj_qkv.weight", rows)]
        moves += base.renamed(f"{theirs}in_proj_", ours, {"z": "gating", "b": "strength", "a": "fading"})
    filters = f"{ours}convolution.weight"
    moves.append(Move(f"{theirs}conv1d.weight", (filters,), lambda x: (x[:, 0],), lambda parts: parts[0][:, None]))
    names = {"dt_bias": "rate.step_bias", "A_log": "rate.log_rate", "norm.weight": "norm_weight"}
    return moves + base.renamed(theirs, ours, names | {"out_proj.weight": "out.weight"}, ("",))


QWEN3_5, QWEN3_NEXT = (
    Family(
        name=name,
        model=model,
        settings=_settings,
        config=partial(_config, fused=fused),
        moves=partial(_moves, fused=fused),
        mechanisms=("full", "gated_delta_net"),
        holder=holder,
    )
    for name, holder, model, fused in (
        ("qwen3_5_text", "qwen3_5", "Qwen3_5ForCausalLM", False),
        ("qwen3_next", None, "Qwen3NextForCausalLM", True),
    )
)
