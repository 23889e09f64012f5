import pytest
import torch
from torch import nn
from torch.nn import functional as F

from subquad.layers.int8 import MOST_ROWS, Int8Linear
from subquad.testing import assert_exact, assert_in_budget


def a_linear(inputs=32, outputs=5, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def weight_of(layer):
    """The weights that the layer stands for, in float64."""
    return layer.integers.double() * layer.scale.double()[:, None]


def test_an_output_has_integers_up_to_127_and_a_scale():
    linear = a_linear(inputs=3, outputs=3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[127.0, -127.0, 0.4], [0.0, 0.0, 0.0], [-63.5, 31.6, 0.2]]))
    layer = Int8Linear(linear)
    assert_exact(layer.integers, torch.tensor([[127, -127, 0], [0, 0, 0], [-127, 63, 0]], dtype=torch.int8))
    assert_exact(layer.scale, torch.tensor([1.0, 0.0, 0.5], dtype=torch.bfloat16))
    assert repr(layer) == "Int8Linear(in_features=3, out_features=3, bias=False)"


def test_a_weight_changes_by_half_a_scale_at_most():
    linear = a_linear(inputs=999, outputs=40)
    layer = Int8Linear(linear)
    steps = (linear.weight.double() - weight_of(layer)).abs() / layer.scale.double()[:, None]
    assert steps.max() <= 0.5
    assert layer.integers.abs().max() == 127


@pytest.mark.parametrize("rows", [0, 1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("inputs", [32, 20])  # torch's kernel takes 16 at a time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_those_of_the_integers_and_scales(rows, inputs, dtype):
    layer = Int8Linear(a_linear(inputs))
    x = random(rows, inputs, dtype=dtype)
    with torch.no_grad():
        y = layer(x)
    half = x.to(torch.bfloat16)
    exact = half.double() @ weight_of(layer).mT + layer.bias.double()
    plain = F.linear(half, weight_of(layer).to(torch.bfloat16), layer.bias.to(torch.bfloat16))
    assert y.dtype == dtype
    assert_in_budget(y, plain, exact, torch.bfloat16)


def test_leading_dimensions_and_a_missing_bias_are_kept():
    layer = Int8Linear(a_linear(bias=False))
    x = random(2, 3, 32)
    with torch.no_grad():
        y = layer(x)
        assert y.shape == (2, 3, 5)
        assert_exact(layer(x[1, 2]), y[1, 2])


def test_a_derivative_is_an_error_and_none_is_not():
    layer, x = Int8Linear(a_linear()), random(1, 32).requires_grad_()
    with pytest.raises(ValueError, match=r"an Int8Linear has no derivative: train first, then quantize"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer(x.detach())


def test_another_dtype_of_the_scales_is_an_error():
    with pytest.raises(ValueError, match=r"the scales of an Int8Linear must be bfloat16, got torch.float16"):
        Int8Linear(a_linear()).half()(random(1, 32))
