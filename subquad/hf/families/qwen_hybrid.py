"""Qwen3.5 (text) and Qwen3-Next without experts: Gated DeltaNet and gated full attention by layer, zero-centred norms.

The two differ in how the matrices of a Gated DeltaNet are joined.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import Family, Move, activation, layer_kinds, mixer, parted, same, stacked
from subquad.models.config import DecoderConfig

_KINDS = {"linear_attention": "gated_delta_net", "full_attention": "full"}


def _settings(config: Any) -> dict[str, Any]:
    _check_dense(config)
    heads = config.linear_num_value_heads
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attention": layer_kinds(config, _KINDS),
        "options": {
            "full": {"output_gate": True, "bias": config.attention_bias},
            "gated_delta_net": {
                "num_heads": heads,
                "num_key_heads": None if config.linear_num_key_heads == heads else config.linear_num_key_heads,
                "key_channels": config.linear_key_head_dim,
                "value_channels": config.linear_value_head_dim,
                "convolution": config.linear_conv_kernel_dim,
                "norm_eps": config.rms_norm_eps,
                "dropout": 0.0,
            },
        },
        "norm": "zero_centred_rms",
        "norm_eps": config.rms_norm_eps,
        "qk_norm": True,
        "feedforward": activation(config, "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
        "ff_dim": config.intermediate_size,
        "position": "rope",
        "max_positions": config.max_position_embeddings,
        "attention_dropout": float(config.attention_dropout),
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ff_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_types": [kinds[name] for name in config.layer_mechanisms],
        "linear_num_value_heads": delta.num_heads,
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.keys,
        "linear_value_head_dim": delta.values,
        "linear_conv_kernel_dim": delta.convolution,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": mixer(config, "full").bias,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
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
