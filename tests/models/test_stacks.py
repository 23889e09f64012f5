"""The registry of stacks, and what `attention` may name."""

import pytest

from subquad.config import Config
from subquad.models import Decoder, DecoderConfig, PerceiverAR
from subquad.models.build import build_model
from subquad.models.stacks import STACKS, Stack, stack_of

SMALL = {"vocab_size": 9, "dim": 16, "num_layers": 2, "num_heads": 2}
every_stack = pytest.mark.parametrize("name", STACKS)


@every_stack
def test_every_stack_says_what_it_is_and_its_options_are_there(name):
    stack = STACKS[name]
    assert stack.name == name
    assert all((stack.summary, stack.paper, stack.cost_order, stack.state))
    assert set(stack.forms) <= {"causal", "bidirectional"}
    assert stack.forms
    options = stack.options
    assert issubclass(options, Config)
    assert options.from_dict(options().to_dict()) == options()


@pytest.mark.parametrize("attention", ["perceiver_ar", ["perceiver_ar"]])
def test_a_stack_is_built_by_its_name(attention):
    config = DecoderConfig(attention=attention, **SMALL)
    assert isinstance(stack_of(config), Stack)
    model = build_model(config)
    assert type(model) is PerceiverAR
    assert model.config is config
    assert model.config_hash == config.digest()


def test_mechanisms_make_a_decoder():
    for attention in ("llp", ["full", "window"]):
        config = DecoderConfig(attention=attention, **SMALL)
        assert stack_of(config) is None
        assert type(build_model(config)) is Decoder


def test_options_of_a_stack_that_is_not_used_are_checked():
    build_model(DecoderConfig(options={"perceiver_ar": {"latents": 7}}, **SMALL))
    with pytest.raises(ValueError, match=r"no key 'options.perceiver_ar.latent'; did you mean 'latents'"):
        build_model(DecoderConfig(options={"perceiver_ar": {"latent": 7}}, **SMALL))
    with pytest.raises(TypeError, match=r"options.perceiver_ar.latents must be int, got 'x'"):
        build_model(DecoderConfig(options={"perceiver_ar": {"latents": "x"}}, **SMALL))


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="unknown attention 'perceiver_a'; did you mean 'perceiver_ar'"):
        build_model(DecoderConfig(attention="perceiver_a", **SMALL))
    with pytest.raises(ValueError, match=r"'perceiver_ar' is a whole stack .* got \['perceiver_ar', 'full'\]"):
        build_model(DecoderConfig(attention=["perceiver_ar", "full"], **SMALL))


@pytest.mark.parametrize("name", [name for name, stack in STACKS.items() if "causal" not in stack.forms])
def test_a_bidirectional_stack_predicts_no_next_token(name):
    with pytest.raises(ValueError, match=f"attention '{name}' has no causal form and cannot predict the next token"):
        build_model(DecoderConfig(attention=name, **SMALL))
