import math

import pytest
import torch
from torch.nn import functional as F

from subquad.attention import build, hgrn2
from subquad.models import Decoder, DecoderConfig
from subquad.testing import AttentionContract, assert_exact, assert_same_maths


class TestHgrn2(AttentionContract):
    name = "hgrn2"


class TestHgrn2InAHigherLayer(AttentionContract):
    """With bounds, and values of another width."""

    name = "hgrn2"
    options = {"value_channels": 5}
    laws = (2, 3, 4, 8, 9, 11, 14, 15)

    def new(self, num_heads):
        layer = super().new(num_heads)
        layer.place(1, 2)
        return layer


@pytest.mark.parametrize("place", [(0, 4), (1, 4)])
def test_it_is_the_papers_recurrence_token_by_token(place):
    torch.manual_seed(0)
    layer = build("hgrn2", dim=12, num_heads=2, value_channels=3)
    layer.place(*place)
    layer = layer.double()
    least = 0.0
    if layer.bound is not None:
        torch.nn.init.normal_(layer.bound)
        least = layer.bound.sigmoid()
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    f = layer.split(least + (1 - least) * layer.key(x).sigmoid())
    g, i = layer.split(layer.query(x).sigmoid()), layer.split(F.silu(layer.value(x)))
    S, outputs = torch.zeros(2, 2, 6, 3, dtype=torch.float64), []
    for t in range(20):
        S = f[:, :, t, :, None] * S + (1 - f[:, :, t, :, None]) * i[:, :, t, None]
        outputs.append((g[:, :, t, None] @ S)[:, :, 0])
    y = torch.stack(outputs, 2)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_same_maths(layer(x)[0], layer.out(y.transpose(1, 2).flatten(2)), "outputs")


def test_bounds_begin_at_their_layers_share_of_a_decoder():
    shape = {"vocab_size": 11, "dim": 16, "num_heads": 2, "num_layers": 4}
    layers = [block.attention for block in Decoder(DecoderConfig(**shape, attention="hgrn2", position="none")).blocks()]
    bounds = [layer.bound for layer in layers]
    assert bounds[0] is None
    for bound, share in zip(bounds[1:], (1 / 4, 2 / 4, 3 / 4), strict=True):
        assert_exact(bound, torch.full((16,), math.log(share / (1 - share))), f"logits of the bound {share}")
    # A channel that forgets all it may: a half of the half that the bound leaves is renewed.
    torch.nn.init.zeros_(layers[2].key.weight)
    scan = layers[2].recurrence(torch.randn(1, 3, 16))[0]
    assert_exact(scan.k_BGTK, torch.full_like(scan.k_BGTK, 0.25), "keys")
    assert_exact(scan.log_f_BHTF, torch.tensor(-0.25).log1p().expand(1, 2, 3, 8), "log decays")


def test_bounds_count_the_layers_of_other_mechanisms():
    shape = {"vocab_size": 11, "dim": 16, "num_heads": 2, "num_layers": 4}
    decoder = Decoder(DecoderConfig(**shape, attention=["window", "hgrn2"]))
    assert_exact(decoder.blocks()[1].attention.bound, torch.full((16,), math.log(1 / 3)), "layer 1 of 4")
    assert_exact(decoder.blocks()[3].attention.bound, torch.full((16,), math.log(3.0)), "layer 3 of 4")


def test_a_layer_whose_place_is_not_known_says_so_once_in_training(caplog):
    hgrn2._warn_not_placed.cache_clear()
    layers, x = [build("hgrn2", dim=16, num_heads=2) for _ in range(3)], torch.randn(1, 3, 16)
    layers[0].place(0, 3)
    layers[0](x)
    layers[1].eval()(x)
    layers[1].train().cost(3)  # runs without data
    assert not caplog.records
    layers[1](x)
    layers[2](x)
    assert len(caplog.records) == 1
    assert "call layer.place(number, layers) of each" in caplog.text


def test_a_layer_in_no_model_may_forget_everything():
    layer = build("hgrn2", dim=16, num_heads=2)
    assert layer.bound is None
    torch.nn.init.constant_(layer.key.weight, -1e4)
    scan = layer.recurrence(torch.ones(1, 3, 16))[0]
    assert_exact(scan.k_BGTK, torch.ones(1, 2, 3, 8), "keys")
    layer.place(1, 2)
    bounded = layer.recurrence(torch.ones(1, 3, 16))[0]
    assert_exact(bounded.k_BGTK, torch.full((1, 2, 3, 8), 0.5), "keys below a bound")
    torch.nn.init.constant_(layer.bound, -200.0)
    found = torch.autograd.grad(layer(torch.ones(1, 3, 16))[0].sum(), [layer.bound, layer.key.weight])
    assert all(gradient.isfinite().all() for gradient in found)
