import math

import torch
from torch.nn import functional as F

from subquad import attention
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import delta_rule, heads, softplus


class TestKda(AttentionContract):
    name = "kda"

    def oracle(self, layer, x_TD):
        steps = heads(softplus(layer.decay_up(layer.decay_down(x_TD)) + layer.rate.step_bias), self.num_heads)
        f_HTK = [(-layer.rate.log_rate[h].exp() * step_TK).exp() for h, step_TK in enumerate(steps)]
        gate_TC = 1 / (1 + (-layer.gate_up(layer.gate_down(x_TD))).exp())
        return layer.out(torch.cat(delta_rule(layer, x_TD, f_HTK), -1) * gate_TC)


def test_a_channel_decays_at_a_rate_of_its_own():
    torch.manual_seed(0)
    layer = attention.build("kda", dim=16, num_heads=2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    sums, q = kept(layer, x)
    step = F.softplus(layer.decay_up(layer.decay_down(x)) + layer.rate.step_bias)[0, :, 8:]
    assert_same_maths(sums.log_f[0, 1], -layer.rate.log_rate[1].exp() * step)
    row, k, b = q[0, 1, 5], sums.k[0, 1], sums.beta[0, 1]
    for t in (5, 4, 3):
        row = (row - b[t] * (row @ k[t]) * k[t]) * sums.log_f[0, 1, t].exp()
    assert_same_maths(layer.weights(x)[0, 1, 5, 2], (row @ k[2] * b[2])[0])


@torch.no_grad()
def test_the_gate_is_a_sigmoid_of_two_projections():
    layer = attention.build("kda", dim=4, num_heads=2).double()
    layer.gate_down.weight.fill_(0.25)  # 1 in both channels
    layer.gate_up.weight.fill_(math.log(3) / 2)
    layer.out = torch.nn.Identity()
    y = layer.finish(torch.ones(1, 2, 1, 2).double(), torch.ones(1, 1, 4).double())
    assert_same_maths(y * (1 + 1e-6) ** 0.5, torch.full((1, 1, 4), 3 / 4, dtype=torch.float64))
