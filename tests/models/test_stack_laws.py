"""The laws of the contract that the stacks' own tests leave: a batch is its rows, and long inputs in half precision."""

import pytest
import torch

from subquad.attention import LAWS
from subquad.models import DecoderConfig
from subquad.models.build import build_model
from subquad.models.encoder import EncoderConfig
from subquad.models.perceiver import PerceiverEncoder
from subquad.models.stacks import STACKS
from subquad.testing import assert_same_maths

SHAPE = {"vocab_size": 20, "dim": 16, "num_layers": 2, "num_heads": 2}
HISTORIES = {
    "cross": ({}, 32_768),
    "self": ({}, 2_048),  # quadratic
    "segments": ({"segment": 64}, 32_768),
    "compressed": ({"history_tokens": 32_512, "projected": 8}, 32_768),
}
MODELS = {f"perceiver_ar {history}": tokens for history, (_, tokens) in HISTORIES.items()}
MODELS |= {"perceiver": 32_768, "perceiver_io": 32_768}
each = pytest.mark.parametrize("name", MODELS)


def make(name, dtype):
    torch.manual_seed(0)
    stack, _, history = name.partition(" ")
    if history:
        options = {"latents": 32, "history": history} | HISTORIES[history][0]
        return build_model(DecoderConfig(**SHAPE, attention=stack, options={stack: options})).to(dtype).eval()
    config = EncoderConfig(**SHAPE, attention=stack, position="sinusoidal", options={stack: {"latents": 8}})
    return PerceiverEncoder(config).to(dtype).eval()


def tokens_of(name, batch, tokens):
    return torch.randint(0, SHAPE["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


def output_of(model, tokens):
    return model.vectors(tokens) if hasattr(model, "vectors") else model(tokens)


@each
def test_law_10_a_batch_is_its_rows(name):
    model, tokens = make(name, torch.float64), tokens_of(name, 3, 70)
    assert_same_maths(output_of(model, tokens), torch.cat([output_of(model, row) for row in tokens.split(1)]), name)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_law_14_long_inputs_in_low_precision_are_finite(name, dtype):
    model = make(name, dtype)
    y = output_of(model, tokens_of(name, 1, MODELS[name]))
    assert y.isfinite().all()
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    for parameter, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), parameter


def test_exemptions_name_laws_and_reasons():
    for stack in STACKS.values():
        assert set(dict(stack.exemptions)) <= set(LAWS)
        assert all(reason for _, reason in stack.exemptions)
        assert ("causal" in stack.forms) == (9 not in dict(stack.exemptions))
