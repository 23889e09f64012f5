import torch

from subquad.attention import build
from subquad.testing import AttentionContract, assert_same_maths


class TestLatte(AttentionContract):
    name = "latte"
    options = {"num_latents": 10}


class TestLatteBidirectional(AttentionContract):
    name = "latte"
    options = {"num_latents": 10, "causal": False}


def test_padding_does_not_set_the_maximum_of_the_softmax():
    layer = build("latte", dim=8, num_heads=2, causal=False).double()
    x, mask = torch.randn(2, 6, 8, dtype=torch.float64), torch.tensor([[True] * 4 + [False] * 2, [False] * 6])
    padded = x.masked_fill(~mask[..., None], 1e6)
    y, _, _ = layer.mix(padded, None, torch.tensor([4, 0]))
    assert y.isfinite().all()
    assert_same_maths(y[:1, :4], layer(x[:1, :4])[0], "real tokens before large rubbish")
