"""Models whose weights are converted: dtypes, weights of eight bits, and their errors."""

import pytest
import torch
from torch import nn

from subquad.generation import generate
from subquad.layers.int8 import Int8Linear
from subquad.models import Decoder, DecoderConfig
from subquad.models.precision import DTYPES, set_precision
from subquad.testing import assert_exact
from tests.generation.models import make, numbers

TOKENS = torch.tensor([[1, 5, 2, 7]])


def converted(name="linear", dtype=None, quantize=None):
    model = make(name).float()
    set_precision(model, dtype, quantize)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_get_the_dtype_and_sums_stay_in_float32(dtype):
    model = converted(dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {DTYPES[dtype]}
    with torch.no_grad():
        logits, state = model(TOKENS)
    assert logits.dtype == DTYPES[dtype]
    assert {x.dtype for x in state.tensors()} == {torch.float32}


@pytest.mark.parametrize("name", ["linear", "full"])  # layers of full attention then have no parameters
def test_every_linear_layer_is_quantized_and_tables_and_norms_are_not(name):
    plain, model = make(name).float(), converted(name, "bfloat16", "int8")
    linear = {key for key, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert {key for key, module in model.named_modules() if isinstance(module, Int8Linear)} == linear
    assert "head" in linear
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_exact(model.embedding.tokens.weight, plain.embedding.tokens.weight.bfloat16())


def test_a_tied_head_is_quantized_and_its_table_is_not():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=23, dim=16, num_layers=1, num_heads=2, attention="linear")).eval()
    table = model.embedding.tokens.weight.clone()
    set_precision(model, quantize="int8")
    assert_exact(model.float().embedding.tokens.weight, table)
    assert isinstance(model.head, Int8Linear)


def test_nothing_asked_changes_nothing():
    model = converted()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


def test_loss_and_texts_need_no_derivatives():
    model = converted(quantize="int8")
    assert model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).isfinite()  # calls the head, and is not in no_grad
    assert len(list(generate(model, numbers(3), max_new_tokens=4, seed=0))) == 4


@pytest.mark.parametrize(("dtype", "quantize", "match"), [
    ("float61", None, r"unknown dtype 'float61'; did you mean 'float16'\? valid: bfloat16, float16, float32"),
    (None, "int4", r"unknown quantize 'int4'; did you mean 'int8'\? valid: int8"),
])  # fmt: skip
def test_an_unknown_precision_is_an_error(dtype, quantize, match):
    with pytest.raises(ValueError, match=match):
        converted(dtype=dtype, quantize=quantize)


def test_a_model_in_training_is_not_converted():
    with pytest.raises(ValueError, match=r"dtype and quantize are for inference, and the model is in training mode"):
        set_precision(make("linear").train(), "float16")


@pytest.mark.parametrize("dtype", ["float16", None])
def test_a_quantized_model_is_not_converted_again(dtype):
    model = converted(quantize="int8")
    with pytest.raises(ValueError, match=r"the model is quantized already: load it again to get other weights"):
        set_precision(model, dtype, None if dtype else "int8")


def test_a_model_with_a_hook_is_not_quantized():
    model = make("linear")
    model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"quantize needs a model with nothing attached, and layers.0 has a hook"):
        set_precision(model, quantize="int8")
    set_precision(model, "float16")  # a hook is called in any dtype
