"""The cost of a layer or model is counted without data: the same whatever the context and the module's mode."""

from contextlib import contextmanager

import pytest
import torch

from subquad.attention import build
from subquad.models import Decoder, DecoderConfig
from subquad.models.classifier import Classifier
from subquad.models.encoder import EncoderConfig
from subquad.ops.backends import use_backend

SIZES = {"dim": 16, "num_heads": 2}


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


@pytest.mark.parametrize(("name", "causal"), [("full", True), ("latte", True), ("luna", False)])
def test_masks_of_dropout_are_kept_for_the_backward_pass(name, causal):
    with_dropout, without = (build(name, **SIZES, causal=causal, dropout=p).cost(40) for p in (0.25, 0.0))
    assert with_dropout.activation_bytes > without.activation_bytes


SHAPE = {"vocab_size": 11, **SIZES, "num_layers": 1, "dropout": 0.25, "position": "sinusoidal", "attention": "latte"}
IO = {"attention": "perceiver_io", "options": {"perceiver_io": {"latents": 4}}}
COUNTED = {
    "layer": lambda: build("llp_printed", **SIZES, dropout=0.25),
    "decoder": lambda: Decoder(DecoderConfig(**SHAPE)),
    "encoder": lambda: Classifier(EncoderConfig(**SHAPE)),
    "perceiver_io": lambda: Classifier(EncoderConfig(**(SHAPE | IO))),
}


@pytest.mark.parametrize("counted", [
    pytest.param(kind, marks=[] if kind in ("layer", "decoder") else pytest.mark.slow) for kind in COUNTED
])  # fmt: skip
def test_neither_context_nor_mode_dtype_and_device_change_the_count_nor_are_changed(counted):
    def context():
        asked = (
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            torch.get_default_dtype,
            torch.get_default_device,
        )
        return [*(ask() for ask in asked), torch.is_autocast_enabled("cpu")]

    module = COUNTED[counted]()
    last, part = [*module.named_modules()][-1]
    part.eval()  # in another mode than the whole
    expected = module.cost(20)
    assert expected.activation_bytes > 0
    for name, make in CONTEXTS.items():
        with make():
            before = context()
            assert module.cost(20) == expected, name
            assert context() == before, name
    assert [name for name, part in module.named_modules() if not part.training] == [last]
    for change in (lambda m: m.eval(), lambda m: m.double(), lambda m: m.to("meta"), lambda m: m.requires_grad_(False)):
        assert change(module).cost(20) == expected


def test_modes_come_back_after_an_error():
    layer = build("linformer", **SIZES, max_tokens=4).eval()
    with pytest.raises(ValueError, match="at most max_tokens=4 tokens, got 5"), default_dtype(torch.float64):
        layer.cost(5)
    assert torch.get_default_dtype() == torch.float32
    assert not any(part.training for part in layer.modules())
