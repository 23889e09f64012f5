"""What autograd keeps, counted without data: the same number wherever it is asked for."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from subquad.attention import build, mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.models.classifier import Classifier
from subquad.models.encoder import EncoderConfig
from subquad.ops.backends import use_backend
from subquad.ops.counting import has_data

SIZES = {"dim": 16, "num_heads": 2}
FORMS = [(name, form == "causal") for name in names() for form in mechanism(name).forms]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64 by default": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta by default": lambda: torch.device("meta"),
    "another backend": lambda: use_backend("reference"),
}
MODULES = {
    "layer in eval": lambda layer: layer.eval(),
    "layer in float64": lambda layer: layer.double(),
    "layer on meta": lambda layer: layer.to("meta"),
    "layer without gradients": lambda layer: layer.requires_grad_(False),
}


@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_the_count_depends_on_the_layer_alone(name, causal):
    layer = build(name, **SIZES, causal=causal, dropout=0.25)
    expected = layer.cost(40).activation_bytes
    assert expected > build(name, **SIZES, causal=causal).cost(40).activation_bytes, "dropout's masks are kept"
    for what, context in CONTEXTS.items():
        with context():
            assert layer.cost(40).activation_bytes == expected, what
    for what, change in MODULES.items():
        assert change(layer).cost(40).activation_bytes == expected, what


@pytest.mark.parametrize("context", [nullcontext, *CONTEXTS.values()], ids=["nothing", *CONTEXTS])
def test_what_was_set_before_is_set_afterwards(context):
    layer = build("llp_printed", **SIZES)
    layer.norm.eval()
    with context():
        asked = (
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            torch.get_default_dtype,
            torch.get_default_device,
            lambda: torch.is_autocast_enabled("cpu"),
        )
        before = [ask() for ask in asked]
        layer.cost(9)
        assert [ask() for ask in asked] == before
    assert [name for name, part in layer.named_modules() if not part.training] == ["norm"]


def test_modes_come_back_after_an_error():
    layer = build("linformer", **SIZES, max_tokens=4).eval()
    with pytest.raises(ValueError, match="at most max_tokens=4 tokens, got 5"), default_dtype(torch.float64):
        layer.cost(5)
    assert torch.get_default_dtype() == torch.float32
    assert not any(part.training for part in layer.modules())


DECODER = {"vocab_size": 11, **SIZES, "num_layers": 2, "dropout": 0.25, "position": "sinusoidal"}
MODELS = {
    "decoder": lambda: Decoder(DecoderConfig(**DECODER, attention="latte")),
    "encoder": lambda: Classifier(EncoderConfig(**DECODER, attention="latte")),
    "perceiver_io": lambda: Classifier(
        EncoderConfig(**DECODER, attention="perceiver_io", options={"perceiver_io": {"latents": 4}})
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_count_of_a_model_depends_on_the_model_alone(name):
    model = MODELS[name]()
    expected = model.cost(20).activation_bytes
    assert expected > 0
    model.eval()
    assert model.cost(20).activation_bytes == expected
    assert not any(part.training for part in model.modules())
    with torch.no_grad(), default_dtype(torch.float64):
        assert model.cost(20).activation_bytes == expected


def test_a_tensor_of_a_shape_only_has_no_data():
    assert has_data(torch.zeros(2))
    assert not has_data(torch.zeros(2, device="meta"))
    with torch._subclasses.FakeTensorMode():
        assert not has_data(torch.zeros(2))
