import math

import pytest
import torch

from subquad.layers.feedforward import Bilinear, SwiGLU, Ungated, build_feedforward
from subquad.testing import assert_same_maths
from subquad.testing.tools import largest_allocation

ACTIVATIONS = {
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: torch.where(z > 0, z, 0.0),
    "relu_squared": lambda z: torch.where(z > 0, z * z, 0.0),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_ungated_feedforwards_are_their_equations_with_their_gradients(kind):
    layer, x = build_feedforward(kind, 12, bias=True).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    leaves = [x.requires_grad_(), *layer.parameters()]
    expected = ACTIVATIONS[kind](x @ layer.up.weight.mT + layer.up.bias) @ layer.down.weight.mT + layer.down.bias
    assert_same_maths(layer(x), expected)
    gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (layer(x), expected))
    for actual, wanted in zip(*gradients, strict=True):
        assert_same_maths(actual, wanted)


def test_swiglu_is_its_equation():
    x, swiglu = torch.randn(2, 5, 12, dtype=torch.float64), build_feedforward("swiglu", 12, bias=True).double()
    gate = swiglu.gate(x)
    assert_same_maths(swiglu(x), swiglu.down(gate * gate.sigmoid() * swiglu.up(x)))


@pytest.mark.parametrize("bias", [False, True])
def test_bilinear_sums_over_all_pairs_of_both_branches(bias):
    layer = build_feedforward("bilinear", 6, mult=1.5, bias=bias).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    weight_kij = layer.down.weight.unflatten(1, (6, 3))
    y = torch.zeros_like(x) if layer.down.bias is None else layer.down.bias.expand_as(x).clone()
    wide, narrow = layer.wide(x), layer.narrow(x)
    for i in range(6):
        for j in range(3):
            pair = wide[..., i] * wide[..., i].sigmoid() * narrow[..., j] * narrow[..., j].sigmoid()
            y += pair[..., None] * weight_kij[:, i, j]
    assert_same_maths(layer(x), y)


@pytest.mark.parametrize("d", [8, 20])
def test_bilinear_has_a_factor_of_eight_by_default(d):
    biased, plain = (sum(p.numel() for p in Bilinear(d, bias=bias).parameters()) for bias in (True, False))
    # W1, b1; W2, b2; W3, b3
    assert biased == (d * d + d) + (8 * d + 8) + (8 * d * d + d)
    assert plain == 9 * d**2 + 8 * d
    assert Bilinear(d, mult=0.1).narrow.out_features == 1


def test_bilinear_holds_no_tensor_of_three_factors():
    layer, x = Bilinear(32), torch.randn(2, 64, 32)
    assert largest_allocation(lambda: layer(x).sum().backward()) <= 4 * (2 * 64) * (32 * 8)


@pytest.mark.parametrize(("dim", "mult", "widths"), [(256, 4.0, (1024, 680)), (96, 4.0, (384, 256)), (4, 0.5, (2, 8))])
def test_hidden_widths(dim, mult, widths):
    assert (Ungated(dim, mult=mult).up.out_features, SwiGLU(dim, mult=mult).gate.out_features) == widths


def test_an_unknown_feedforward_is_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match="unknown feed-forward 'swigl'; did you mean 'swiglu'"):
        build_feedforward("swigl", 12)
