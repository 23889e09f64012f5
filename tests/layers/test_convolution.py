import pytest
import torch
from torch.nn import functional as F

from subquad.layers.convolution import ShortConvolution
from subquad.testing import assert_exact, assert_same_maths


def make(width, bias=False):
    torch.manual_seed(0)
    return ShortConvolution(3, width, bias=bias).double()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_is_torchs_causal_convolution_of_each_channel(width):
    layer, x = make(width, bias=True), torch.randn(2, 9, 3, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias)
    expected = F.conv1d(F.pad(x.mT, (width - 1, 0)), layer.weight[:, None], layer.bias, groups=3).mT
    assert_same_maths(layer(F.pad(x, (0, 0, width - 1, 0))), expected)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 8, 9])
def test_a_cut_changes_no_bit(cut):
    """Where the rows before the cut stand before those after it; `Past.extended` keeps them."""
    layer, x = make(4), torch.randn(2, 3 + 9, 3, dtype=torch.float64)
    assert_exact(torch.cat([layer(x[:, : 3 + cut]), layer(x[:, cut:])], 1), layer(x))


def test_a_width_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a convolution's width must be at least 1, got 0"):
        ShortConvolution(3, 0)
