"""The registry of stacks, and long inputs in low precision."""

import pytest
import torch

from subquad.attention.laws import Law
from subquad.config import Config
from subquad.models import Decoder, DecoderConfig, PerceiverAR
from subquad.models.build import build_encoder, build_model
from subquad.models.encoder import EncoderConfig
from subquad.models.stacks import STACKS, Stack, stack_of

SMALL = {"vocab_size": 20, "dim": 16, "num_layers": 2, "num_heads": 2}
MODELS = {
    "cross": ({}, 32_768),
    "self": ({}, 2_048),  # quadratic
    "segments": ({"segment": 64}, 32_768),
    "compressed": ({"history_tokens": 32_512, "projected": 8}, 32_768),
    "perceiver": ({"latents": 8}, 32_768),
    "perceiver_io": ({"latents": 8}, 32_768),
}


def model_of(name):
    torch.manual_seed(0)
    options, _ = MODELS[name]
    if name in STACKS:
        return build_encoder(EncoderConfig(**SMALL, attention=name, position="sinusoidal", options={name: options}))
    options = {"perceiver_ar": {"latents": 32, "history": name} | options}
    return build_model(DecoderConfig(**SMALL, attention="perceiver_ar", options=options))


@pytest.mark.parametrize("name", ["perceiver_ar", "perceiver"])
def test_a_stack_needs_a_feed_forward_network(name):
    with pytest.raises(ValueError, match=f"attention '{name}' needs a feed-forward network, got feedforward='none'"):
        stack_of(DecoderConfig(**SMALL, attention=name, feedforward="none"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_inputs_in_low_precision_are_finite(name, dtype):
    model = model_of(name).to(dtype)
    tokens = torch.randint(0, 20, (1, MODELS[name][1]), generator=torch.Generator().manual_seed(1))
    y = model(tokens) if name in STACKS else model.vectors(tokens)
    assert y.isfinite().all()
    (y.float() * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    for parameter, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), parameter


@pytest.mark.parametrize("name", STACKS)
def test_every_stack_describes_itself(name):
    stack = STACKS[name]
    assert stack.name == name
    assert issubclass(stack.options, Config)
    assert stack.options.from_dict(stack.options().to_dict()) == stack.options()
    assert set(dict(stack.exemptions)) <= set(Law)
    assert all(reason for _, reason in stack.exemptions)
    assert ("causal" in stack.forms) == (Law.NO_FUTURE not in dict(stack.exemptions))


def test_a_name_makes_a_stack_and_mechanisms_a_decoder():
    for attention in ("perceiver_ar", ["perceiver_ar"]):
        config = DecoderConfig(attention=attention, **SMALL)
        assert isinstance(stack_of(config), Stack)
        model = build_model(config)
        assert type(model) is PerceiverAR
        assert model.config is config
        assert model.config_hash == config.digest()
    for attention, mechanisms in (("llp", ["llp"]), (["full", "window"], ["full", "window"])):
        config = DecoderConfig(attention=attention, **SMALL)
        assert config.mechanisms == mechanisms
        assert stack_of(config) is None
        assert type(build_model(config)) is Decoder


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"attention": "perceiver_a"}, ValueError, "unknown attention 'perceiver_a'; did you mean 'perceiver_ar'"),
    ({"attention": ["perceiver_ar", "full"]}, ValueError, r"is a whole stack .* \['perceiver_ar', 'full'\]"),
    ({"attention": "perceiver"}, ValueError, "attention 'perceiver' has no causal form and cannot predict the next"),
    ({"options": {"perceiver_ar": {"latents": "x"}}}, TypeError, "options.perceiver_ar.latents must be int, got 'x'"),
])  # fmt: skip
def test_names_and_options_that_do_not_fit_are_refused(fields, error, message):
    build_model(DecoderConfig(options={"perceiver_ar": {"latents": 7}}, **SMALL))
    with pytest.raises(error, match=message):
        build_model(DecoderConfig(**SMALL, **fields))
