"""GPT-NeoX (Pythia): layer norms, parallel residual, partial rotation, one matrix for queries, keys and values."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import NAMES, Family, Move, activation, given, same, stacked, taken
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_NAMES = NAMES | {
    "ff_dim": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
    "dropout": "hidden_dropout",
    "qkv_bias": "attention_bias",
}


def _settings(config: Any) -> dict[str, Any]:
    return {
        **taken(config, _NAMES),
        "norm": "layer",
        "feedforward": activation(config, "hidden_act", _ACTIVATIONS),
        "position": "rope",
        "out_bias": config.attention_bias,
        "ff_bias": True,
        "dropout": float(config.hidden_dropout),
        "attention_dropout": float(config.attention_dropout),
        **rope.read(config, partial=True),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    activation_name = "gelu" if config.feedforward == "gelu" else "gelu_new"
    values = {**given(config, _NAMES), "hidden_act": activation_name, **rope.write(config)}
    values["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return values


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [same("gpt_neox.embed_in.weight", "embedding.tokens.weight")]
    pairs = [("gpt_neox.final_layer_norm", "norm")]
    for i in range(config.num_layers):
        theirs, ours = f"gpt_neox.layers.{i}", f"layers.{i}"
        pairs += [
            (f"{theirs}.input_layernorm", f"{ours}.attention_norm"),
            (f"{theirs}.post_attention_layernorm", f"{ours}.feedforward_norm"),
            (f"{theirs}.mlp.dense_h_to_4h", f"{ours}.feedforward.up"),
            (f"{theirs}.mlp.dense_4h_to_h", f"{ours}.feedforward.down"),
        ]
        moves.append(same(f"{theirs}.attention.dense.weight", f"{ours}.attention.out.weight"))
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [f"{ours}.attention.{name}.{kind}" for name in ("query", "key", "value")]
            moves.append(stacked(f"{theirs}.attention.query_key_value.{kind}", parts, heads=config.num_heads))
        if config.out_bias:
            moves.append(same(f"{theirs}.attention.dense.bias", f"{ours}.attention.out.bias"))
    return moves + [same(f"{a}.{kind}", f"{b}.{kind}") for a, b in pairs for kind in ("weight", "bias")]


GPT_NEOX = Family(
    name="gpt_neox",
    model="GPTNeoXForCausalLM",
    settings=_settings,
    config=_config,
    moves=_moves,
)
