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
    assert_same_maths(layer(x), expected)


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 8, 9])
def test_a_cut_changes_no_bit(cut):
    layer, x = make(4), torch.randn(2, 9, 3, dtype=torch.float64)
    before = layer.last(x[:, :cut], None, None)
    assert before.shape == (2, 3, 3)
    assert_exact(torch.cat([layer(x[:, :cut]), layer(x[:, cut:], before)], 1), layer(x))
    assert_exact(layer.last(x[:, cut:], before, None), layer.last(x, None, None))


def test_the_last_tokens_are_real_ones():
    layer, x = make(4), torch.randn(3, 6, 3, dtype=torch.float64)
    before = torch.randn(3, 3, 3, dtype=torch.float64)
    last = layer.last(x, before, torch.tensor([0, 2, 6]))
    assert_exact(last, torch.stack([before[0], torch.cat([before[1, 2:], x[1, :2]]), x[2, 3:]]))


def test_a_width_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a convolution's width must be at least 1, got 0"):
        ShortConvolution(3, 0)
