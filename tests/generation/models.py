"""Tiny float64 models of every causal mechanism and stack, with sharp and varied predictions."""

import pytest
import torch

from subquad import attention
from subquad.models import Decoder, DecoderConfig
from subquad.models.build import build_model

VOCABULARY = 23
SMALL = {
    "bigbird": {"block": 3, "num_global": 1, "num_random": 1}, "dilated": {"width": 2, "dilation": 3},
    "latte_macchiato": {"width": 4}, "llp": {"segment": 6}, "llp_printed": {"segment": 6},
    "logsparse": {"width": 4, "max_tokens": 64},
    "longformer": {"width": 4, "num_global": 3}, "shifted": {"group": 4}, "strided": {"stride": 4, "columns": 2},
    "window": {"width": 4},
}  # fmt: skip
HISTORIES = {
    "cross": {}, "self": {"history_tokens": 6}, "segments": {"segment": 3},
    "compressed": {"history_tokens": 6, "projected": 2},
}  # fmt: skip
MECHANISMS = [name for name in attention.names() if "causal" in attention.mechanism(name).forms]
EXACT, REFILL = ([f"perceiver_ar {history} {decode}" for history in HISTORIES] for decode in ("exact", "refill"))
QUICK = [*MECHANISMS, *EXACT, "perceiver_ar self refill", "hybrid", "loops", "learned", "sinks", "post"]
ALL = [*QUICK, *(name for name in REFILL if name not in QUICK), "llp first block", "gated", "diagonal"]


def with_models(quick=QUICK, names=ALL):
    """Parametrize a test by the `name` of a model; names outside `quick` are slow."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [name if name in quick else pytest.param(name, marks=slow) for name in names]
    )


FIRST_BLOCK = {"first_block_projections": True, "shared_kv": False, "key_norm": False, "split_output": False}
OWN = {
    "llp first block": {"attention": "llp_printed", "options": {"llp_printed": {"segment": 6, **FIRST_BLOCK}}},
    "hybrid": {"attention": ["latte", "full"], "position": "sinusoidal"},
    "loops": {"attention": "window", "options": {"window": {"width": 4}}, "loops": 2},
    "learned": {"attention": "linear", "position": "learned", "max_positions": 64},
    "diagonal": {
        "attention": "elita",
        "norm": "unscaled_layer",
        "position": "none",
        "options": {"elita": {"self_term": "diagonal"}},
    },
    "post": {
        "attention": ["latte", "full"],
        "position": "sinusoidal",
        "position_scale": 1.0,
        "norm_position": "post",
        "feedforward": "relu_squared",
        "head_bias": True,
    },
    "gated": {
        "attention": ["gated_delta_net", "full"],
        "norm": "zero_centred_rms",
        "head_dim": 8,
        "qk_norm": True,
        "rope_fraction": 0.5,
        "options": {
            "gated_delta_net": {"num_heads": 4, "num_key_heads": 2, "key_channels": 5, "value_channels": 3},
            "full": {"output_gate": True},
        },
    },
    "sinks": {
        "attention": ["window", "llp"],
        "options": {
            "window": {"width": 4, "sinks": 5, "learned_sink": True, "num_kv_heads": 1},
            "llp": {"segment": 4, "sinks": 3, "shifted_heads": True},
        },
    },
}


def config_of(name: str) -> DecoderConfig:
    shape = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "tie_embeddings": False}
    if name in OWN:
        return DecoderConfig(**shape | OWN[name])
    if name.startswith("perceiver_ar"):
        _, history, decode = name.split()
        options = {"latents": 5, "history": history, "decode": decode, **HISTORIES[history]}
        return DecoderConfig(**shape, attention="perceiver_ar", options={"perceiver_ar": options})
    position = "rope" if attention.mechanism(name).rotates else "sinusoidal"
    own = {name: SMALL[name]} if name in SMALL else {}
    return DecoderConfig(**shape, attention=name, options=own, position=position)


def make(name: str) -> Decoder:
    torch.manual_seed(1)
    model = build_model(config_of(name)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 2)
        model.embedding.tokens.weight.mul_(3)  # so that the next token depends much on the last one
    return model


def numbers(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
