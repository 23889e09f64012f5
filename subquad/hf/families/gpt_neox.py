"""GPT-NeoX (Pythia): layer norms, parallel residual, partial rotation, one matrix for queries, keys and values."""

from __future__ import annotations

from typing import Any

from subquad.hf.families import rope
from subquad.hf.families.base import Family, Move, activation, same, stacked
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def _settings(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "ff_dim": config.intermediate_size,
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "feedforward": activation(config, "hidden_act", _ACTIVATIONS),
        "parallel_residual": config.use_parallel_residual,
        "position": "rope",
        "max_positions": config.max_position_embeddings,
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "ff_bias": True,
        "dropout": float(config.hidden_dropout),
        "attention_dropout": float(config.attention_dropout),
        "tie_embeddings": config.tie_word_embeddings,
        "init_std": config.initializer_range,
        **rope.read(config, partial=True),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.ff_dim,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu" if config.feedforward == "gelu" else "gelu_new",
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.qkv_bias,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        **rope.write(config),
    }
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
