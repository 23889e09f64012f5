import torch
from torch.nn import functional as F

from subquad import attention
from subquad.testing import AttentionContract, assert_same_maths


class TestGatedDeltaNet(AttentionContract):
    name = "gated_delta_net"


def test_a_head_decays_before_its_key_is_overwritten():
    torch.manual_seed(0)
    layer = attention.build("gated_delta_net", dim=16, num_heads=2).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    scan, _ = layer.recurrence(x)
    step = F.softplus(layer.fading(x) + layer.rate.step_bias)[0, :, 1]
    assert_same_maths(scan.log_f_BHTF[0, 1, :, 0], -layer.rate.log_rate[1].exp() * step)
    row, k, b = scan.q_BGTK[0, 1, 5], scan.k_BGTK[0, 1], scan.beta_BHT1[0, 1]
    for t in (5, 4, 3):
        row = (row - b[t] * (row @ k[t]) * k[t]) * scan.log_f_BHTF[0, 1, t].exp()
    assert_same_maths(scan.weights()[0, 1, 5, 2], (row @ k[2] * b[2])[0])


def test_the_decays_begin_in_mambas_ranges():
    rate = attention.build("gated_delta_net", dim=1024, num_heads=256).rate
    rates, steps = rate.log_rate.exp(), F.softplus(rate.step_bias)
    assert 1 <= rates.min() < 2
    assert 15 < rates.max() <= 16.001
    assert 0.000999 < steps.min() < 0.002
    assert 0.05 < steps.max() < 0.1001
