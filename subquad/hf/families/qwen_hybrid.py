"""Qwen3.5 (text) and Qwen3-Next without experts: Gated DeltaNet and gated full attention by layer, zero-centred norms.

The two differ in how the matrices of a Gated DeltaNet are joined.
"""

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
    mixer,
    parted,
    same,
    stacked,
    taken,
)
from subquad.models.config import DecoderConfig

_KINDS = {"linear_attention": "gated_delta_net", "full_attention": "full"}
_NAMES = RMS_NAMES | {"head_dim": "head_dim", "ff_dim": "intermediate_size"}
_MIXER = {
    "num_heads": "linear_num_value_heads",
    "key_channels": "linear_key_head_dim",
    "value_channels": "linear_value_head_dim",
    "convolution": "linear_conv_kernel_dim",
}


def _settings(config: Any) -> dict[str, Any]:
    _check_dense(config)
    delta = {**taken(config, _MIXER), "norm_eps": config.rms_norm_eps, "dropout": 0.0}
    if config.linear_num_key_heads != config.linear_num_value_heads:
        delta["num_key_heads"] = config.linear_num_key_heads
    return {
        **taken(config, _NAMES),
        "attention": layer_kinds(config, _KINDS),
        "options": {"full": {"output_gate": True, "bias": config.attention_bias}, "gated_delta_net": delta},
        "norm": "zero_centred_rms",
        "qk_norm": True,
        "feedforward": activation(config, "hidden_act", SWIGLU),
        "position": "rope",
        "attention_dropout": float(config.attention_dropout),
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
    delta, kinds = mixer(config, "gated_delta_net"), {ours: theirs for theirs, ours in _KINDS.items()}
    values = {
        **given(config, _NAMES),
        **given(delta, _MIXER),
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.keys,
        "linear_value_head_dim": delta.values,
        "layer_types": [kinds[name] for name in config.layer_mechanisms],
        "attention_bias": mixer(config, "full").bias,
        **({"num_experts": 0} if fused else {}),
        **rope.write(config),
    }
    values["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return values


def _moves(config: DecoderConfig, *, fused: bool) -> list[Move]:
    kinds = ("weight", "bias") if mixer(config, "full").bias else ("weight",)
    pairs = [("model.embed_tokens", "embedding.tokens"), ("model.norm", "norm")]
    moves: list[Move] = []
    for i, name in enumerate(config.layer_mechanisms):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        pairs += [
            (f"{theirs}.input_layernorm", f"{ours}.attention_norm"),
            (f"{theirs}.post_attention_layernorm", f"{ours}.feedforward_norm"),
            *((f"{theirs}.mlp.{part}_proj", f"{ours}.feedforward.{part}") for part in ("gate", "up", "down")),
        ]
        if name == "gated_delta_net":
            moves += _delta_moves(config, f"{theirs}.linear_attn", f"{ours}.attention", fused=fused)
            continue
        theirs, ours = f"{theirs}.self_attn", f"{ours}.attention"
        pairs += [(f"{theirs}.{letter}_norm", f"{ours}.{part}_norm") for letter, part in (("q", "query"), ("k", "key"))]
        for kind in kinds:
            parts = [f"{ours}.query.{kind}", f"{ours}.gating.{kind}"]
            moves.append(stacked(f"{theirs}.q_proj.{kind}", parts, heads=config.num_heads))
            for letter, part in {"k": "key", "v": "value", "o": "out"}.items():
                moves.append(same(f"{theirs}.{letter}_proj.{kind}", f"{ours}.{part}.{kind}"))
    return moves + [same(f"{a}.weight", f"{b}.weight") for a, b in pairs]


def _delta_moves(config: DecoderConfig, theirs: str, ours: str, *, fused: bool) -> list[Move]:
    """Return the moves of one Gated DeltaNet; `fused` matrices hold the rows of one key head after another."""
    own = mixer(config, "gated_delta_net")
    keys, values, groups = own.keys * own.key_heads, own.values * own.num_heads, own.key_heads
    rows = {f"{ours}.query.weight": keys, f"{ours}.key.weight": keys, f"{ours}.value.weight": values}
    gate, strength, fading = (f"{ours}.{name}.weight" for name in ("gating", "strength", "fading"))
    if fused:
        moves = [
            parted(f"{theirs}.in_proj_qkvz.weight", rows | {gate: values}, heads=groups),
            stacked(f"{theirs}.in_proj_ba.weight", (strength, fading), heads=groups),
        ]
    else:
        moves = [
            parted(f"{theirs}.in_proj_qkv.weight", rows),
            *(same(f"{theirs}.in_proj_{x}.weight", name) for x, name in (("z", gate), ("b", strength), ("a", fading))),
        ]
    filters = f"{ours}.convolution.weight"
    moves.append(Move(f"{theirs}.conv1d.weight", (filters,), lambda x: (x[:, 0],), lambda parts: parts[0][:, None]))
    names = {"dt_bias": "rate.step_bias", "A_log": "rate.log_rate", "norm.weight": "norm_weight"}
    names["out_proj.weight"] = "out.weight"
    return moves + [same(f"{theirs}.{their_name}", f"{ours}.{our_name}") for their_name, our_name in names.items()]


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
