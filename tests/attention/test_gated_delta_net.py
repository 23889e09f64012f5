import math

import pytest
import torch
from torch.nn import functional as F

from subquad import attention
from subquad.attention.laws import Law
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import delta_rule, silu, softplus


class TestGatedDeltaNet(AttentionContract):
    name = "gated_delta_net"

    def oracle(self, layer, x_TD):
        f_TH = (-layer.rate.log_rate.exp() * softplus(layer.fading(x_TD) + layer.rate.step_bias)).exp()
        f_HTK = [f_TH[:, h, None].expand(-1, layer.config.keys) for h in range(self.num_heads)]
        return layer.out(torch.cat(delta_rule(layer, x_TD, f_HTK), -1) * silu(layer.gating(x_TD)))


class TestGatedDeltaNetWithKeyHeads(TestGatedDeltaNet):
    """Two heads of queries and keys for four of values, whose channels do not divide the model width."""

    name = "gated_delta_net"
    num_heads, fewest_heads = 4, 2
    options = {"num_key_heads": 2, "key_channels": 5, "value_channels": 3, "convolution": 2}
    laws = (Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.PRECISION, Law.DOCUMENTS, Law.RANKS)


@torch.no_grad()
def test_neighbouring_heads_share_queries_and_keys():
    """Each of two key heads serves two neighbouring heads: the same as four with these rows twice."""
    torch.manual_seed(0)
    channels = {"dim": 10, "num_heads": 4, "key_channels": 3, "value_channels": 2}
    shared = attention.build("gated_delta_net", **channels, num_key_heads=2).double()
    own = attention.build("gated_delta_net", **channels).double()
    keys = torch.arange(6).view(2, 3).repeat_interleave(2, 0).flatten()
    rows = torch.cat([keys, 6 + keys, torch.arange(12, 20)])
    weights = shared.state_dict()
    for name, places in (("query.weight", keys), ("key.weight", keys), ("convolution.weight", rows)):
        weights[name] = weights[name][places]
    own.load_state_dict(weights)
    x = torch.randn(2, 70, 10, dtype=torch.float64)
    assert_same_maths(shared(x)[0], own(x)[0])
    assert_same_maths(shared.weights(x), own.weights(x))


@pytest.mark.parametrize(("options", "message"), [
    ({"num_key_heads": 3}, "num_key_heads must divide num_heads, got num_key_heads=3, num_heads=4"),
    ({"num_key_heads": 0}, "num_key_heads must divide num_heads, got num_key_heads=0"),
    ({"dim": 10}, "dim must be a positive multiple of num_heads, got dim=10"),
    ({"dim": 0, "key_channels": 2, "value_channels": 2}, "dim must be at least 1, got 0"),
])  # fmt: skip
def test_heads_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention.build("gated_delta_net", **{"dim": 16, "num_heads": 4} | options)


def test_a_head_decays_before_its_key_is_overwritten():
    torch.manual_seed(0)
    layer = attention.build("gated_delta_net", dim=16, num_heads=2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    sums, q = kept(layer, x)
    step = F.softplus(layer.fading(x) + layer.rate.step_bias)[0, :, 1]
    assert_same_maths(sums.log_f[0, 1, :, 0], -layer.rate.log_rate[1].exp() * step)
    row, k, b = q[0, 1, 5], sums.k[0, 1], sums.beta[0, 1]
    for t in (5, 4, 3):
        row = (row - b[t] * (row @ k[t]) * k[t]) * sums.log_f[0, 1, t].exp()
    assert_same_maths(layer.weights(x)[0, 1, 5, 2], (row @ k[2] * b[2])[0])


def test_the_decays_begin_in_mambas_ranges():
    rate = attention.build("gated_delta_net", dim=1024, num_heads=256).rate
    rates, steps = rate.log_rate.exp(), F.softplus(rate.step_bias)
    assert 1 <= rates.min() < 2
    assert 15 < rates.max() <= 16.001
    assert 0.000999 < steps.min() < 0.002
    assert 0.05 < steps.max() < 0.1001


@pytest.mark.parametrize(("dim", "heads", "keys", "values"), [(64, 4, 12, 24), (16, 2, 6, 12), (2, 2, 1, 2)])
def test_keys_have_three_quarters_of_a_heads_size_and_values_twice_the_keys(dim, heads, keys, values):
    layer = attention.build("gated_delta_net", dim=dim, num_heads=heads)
    shapes = [tuple(layer.get_submodule(name).weight.shape) for name in ("query", "key", "value", "gating")]
    assert shapes == [(keys * heads, dim)] * 2 + [(values * heads, dim)] * 2


@torch.no_grad()
def test_the_gate_is_silu():
    layer = attention.build("gated_delta_net", dim=4, num_heads=1).double()
    layer.gating.weight.fill_(math.log(3) / 4)
    layer.out = torch.nn.Identity()
    y = layer.finish(torch.ones(1, 1, 1, 6).double(), torch.ones(1, 1, 4).double())
    assert_same_maths(y * (1 + 1e-6) ** 0.5, torch.full((1, 1, 6), 0.75 * math.log(3), dtype=torch.float64))
