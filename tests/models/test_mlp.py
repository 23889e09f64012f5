"""Fully connected layers."""

import pytest
import torch
from torch import nn

from subquad.models.mlp import Mlp
from subquad.testing import assert_exact


def test_it_is_linear_layers_with_relu_between_them():
    torch.manual_seed(0)
    net, x = Mlp(5, 4, 3), torch.randn(2, 5)
    first, second = net.layers
    assert_exact(net(x), second(nn.functional.relu(first(x))))
    assert sum(p.numel() for p in Mlp(784, 64, 64, 10).parameters()) == 55_050
    for widths in ((), (3,), (3, 0)):
        with pytest.raises(ValueError, match="widths must be at least two numbers, each at least 1"):
            Mlp(*widths)
