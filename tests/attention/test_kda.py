import math

import torch
from torch.nn import functional as F

from subquad import attention
from subquad.testing import AttentionContract, assert_same_maths


class TestKda(AttentionContract):
    name = "kda"


def test_a_channel_decays_at_a_rate_of_its_own():
    torch.manual_seed(0)
    layer = attention.build("kda", dim=16, num_heads=2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    scan, _ = layer.recurrence(x)
    step = F.softplus(layer.decay_up(layer.decay_down(x)) + layer.rate.step_bias)[0, :, 8:]
    assert_same_maths(scan.log_f_BHTF[0, 1], -layer.rate.log_rate[1].exp() * step)
    row, k, b = scan.q_BGTK[0, 1, 5], scan.k_BGTK[0, 1], scan.beta_BHT1[0, 1]
    for t in (5, 4, 3):
        row = (row - b[t] * (row @ k[t]) * k[t]) * scan.log_f_BHTF[0, 1, t].exp()
    assert_same_maths(scan.weights()[0, 1, 5, 2], (row @ k[2] * b[2])[0])


@torch.no_grad()
def test_the_gate_is_a_sigmoid_of_two_projections():
    layer = attention.build("kda", dim=4, num_heads=2).double()
    layer.gate_down.weight.fill_(0.25)  # 1 in both channels
    layer.gate_up.weight.fill_(math.log(3) / 2)
    gate = layer.gate(torch.ones(1, 1, 4, dtype=torch.float64))
    assert_same_maths(gate, torch.full((1, 1, 4), 3 / 4, dtype=torch.float64))
