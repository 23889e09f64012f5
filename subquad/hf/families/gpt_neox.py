"""GPT-NeoX (Pythia): layer norms, parallel residual, partial rotation, one matrix for queries, keys and values."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import base, rope
from subquad.hf.families.base import Family, Move
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_NAMES = base.NAMES | {
    "ff_dim": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
    "dropout": "hidden_dropout",
    "qkv_bias": "attention_bias",
}


def _settings(config: Any) -> dict[str, Any]:
    return {
        **base.taken(config, _NAMES),
        "norm": "layer",
        "feedforward": base.activation(config, "hidden_act", _ACTIVATIONS),
        "position": "rope",
        "out_bias": config.attention_bias,
        "ff_bias": True,
        **rope.read(config, partial=True),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    activation_name = "gelu" if config.feedforward == "gelu" else "gelu_new"
    return {**base.given(config, _NAMES), "hidden_act": activation_name, **rope.write(config, partial=True)}


def _moves(config: DecoderConfig) -> list[Move]:
    moves = base.renamed("gpt_neox.", "", {"embed_in": "embedding.tokens"})
    moves += base.renamed("gpt_neox.", "", {"final_layer_norm": "norm"}, base.BOTH)
    own = base.NORMS | {"mlp.dense_h_to_4h": "feedforward.up", "mlp.dense_4h_to_h": "feedforward.down"}
    for i in range(config.num_layers):
        theirs, ours = f"gpt_neox.layers.{i}.", f"layers.{i}."
        moves += base.renamed(theirs, ours, own, base.BOTH)
        moves += base.renamed(theirs, ours, {"attention.dense": "attention.out"}, base.with_bias(config.out_bias))
        for tensor in base.with_bias(config.qkv_bias):
            parts = [f"{ours}attention.{name}{tensor}" for name in ("query", "key", "value")]
            moves.append(base.stacked(f"{theirs}attention.query_key_value{tensor}", parts, heads=config.num_heads))
    return moves


GPT_NEOX = Family(name="gpt_neox", model="GPTNeoXForCausalLM", settings=_settings, config=_config, moves=_moves)
