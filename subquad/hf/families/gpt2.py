"""GPT-2: layer norms, learned positions, GELU feed-forward, biases everywhere, matrices stored as `[in, out]`."""

from __future__ import annotations

from typing import Any

from subquad.hf.families.base import Family, Move, activation, given, require, same, stacked, taken, transposed
from subquad.models.config import DecoderConfig

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_NAMES = {
    "vocab_size": "vocab_size",
    "dim": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}


def _settings(config: Any) -> dict[str, Any]:
    require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if config.embd_pdrop != config.resid_pdrop:
        raise ValueError(
            f"our decoder has one dropout and does not support gpt2 with embd_pdrop={config.embd_pdrop} and "
            f"resid_pdrop={config.resid_pdrop}; set both to the same value"
        )
    return {
        **taken(config, _NAMES),
        "ff_dim": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "norm": "layer",
        "feedforward": activation(config, "activation_function", _ACTIVATIONS),
        "position": "learned",
        "bias": True,
        "dropout": float(config.resid_pdrop),
        "attention_dropout": float(config.attn_pdrop),
    }


def _config(config: DecoderConfig) -> dict[str, Any]:
    return {
        **given(config, _NAMES),
        "n_inner": config.ff_dim,
        "activation_function": "gelu" if config.feedforward == "gelu" else "gelu_new",
        "embd_pdrop": config.dropout,
    }


def _moves(config: DecoderConfig) -> list[Move]:
    moves = [
        same("transformer.wte.weight", "embedding.tokens.weight"),
        same("transformer.wpe.weight", "embedding.position.table.weight"),
    ]
    pairs = [("transformer.ln_f", "norm")]
    for i in range(config.num_layers):
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        pairs += [(f"{theirs}.ln_1", f"{ours}.attention_norm"), (f"{theirs}.ln_2", f"{ours}.feedforward_norm")]
        for kind in ("weight", "bias"):
            parts = [f"{ours}.attention.{name}.{kind}" for name in ("query", "key", "value")]
            moves.append(stacked(f"{theirs}.attn.c_attn.{kind}", parts, transpose=kind == "weight"))
        for their_name, our_name in (
            ("attn.c_proj", "attention.out"),
            ("mlp.c_fc", "feedforward.up"),
            ("mlp.c_proj", "feedforward.down"),
        ):
            moves += [
                transposed(f"{theirs}.{their_name}.weight", f"{ours}.{our_name}.weight"),
                same(f"{theirs}.{their_name}.bias", f"{ours}.{our_name}.bias"),
            ]
    return moves + [same(f"{a}.{kind}", f"{b}.{kind}") for a, b in pairs for kind in ("weight", "bias")]


GPT2 = Family(name="gpt2", model="GPT2LMHeadModel", settings=_settings, config=_config, moves=_moves)
