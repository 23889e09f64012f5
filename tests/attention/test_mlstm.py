import pytest
import torch
from torch.nn import functional as F

from subquad.attention import build
from subquad.testing import AttentionContract, assert_exact, assert_same_maths


class TestMlstm(AttentionContract):
    name = "mlstm"


class TestMlstmWithLargeGates(AttentionContract):
    """Logarithms of gates up to hundreds, whose exponentials only float64 holds."""

    name = "mlstm"
    options = {}
    gates = 100.0
    laws = (2, 3, 4, 7, 8, 9, 15)
    # Almost all weight is on one token, and the definition divides its q . k by itself; a state must sum both apart.
    test_law_11_each_backend_and_dtype_stays_in_budget = None
    test_law_11_autocast_stays_in_budget = None

    def new(self, num_heads):
        layer = super().new(num_heads)
        with torch.no_grad():
            layer.input_forget.weight *= self.gates
        return layer


class TestMlstmWithHugeGates(TestMlstmWithLargeGates):
    """Logarithms of gates up to tens of thousands."""

    name = "mlstm"
    options = {}
    gates = 1e4
    laws = (2, 3, 9, 14)


@pytest.mark.parametrize("gates", [1.0, 100.0])
def test_it_is_the_papers_recurrence_without_m(gates):
    torch.manual_seed(0)
    layer = build("mlstm", dim=12, num_heads=2, key_channels=5, value_channels=3).double()
    with torch.no_grad():
        layer.input_forget.weight[:2] *= gates
        layer.norm_weight.normal_()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    q, k, v = (layer.split(project(x)) for project in (layer.query, layer.key, layer.value))
    log_i, z = (layer.input_forget(x) + layer.input_forget_bias).chunk(2, -1)
    i, f = log_i.exp(), z.sigmoid()
    S, n, bounded, outputs = torch.zeros(2, 2, 5, 3).double(), torch.zeros(2, 2, 5).double(), 0, []
    for t in range(30):
        i_t, f_t, k_t = i[:, t, :, None], f[:, t, :, None], k[:, :, t] / 5**0.5
        S, n = f_t[..., None] * S + i_t[..., None] * k_t[..., None] * v[:, :, t, None], f_t * n + i_t * k_t
        total = (n * q[:, :, t]).sum(-1, keepdim=True).abs()
        bounded += int((total < 1).sum())
        outputs.append((q[:, :, t, None] @ S)[:, :, 0] / total.clamp(min=1))
    assert 0 < bounded < 120, "both sides of the maximum are tried"
    h = torch.stack(outputs, 2)
    y = F.layer_norm(h, (3,), eps=1e-5) * layer.norm_weight.view(2, 1, 3)
    expected = layer.out(y.transpose(1, 2).flatten(2) * layer.gating(x).sigmoid())
    assert_same_maths(layer(x)[0], expected, "outputs")


def test_forget_gates_begin_open():
    torch.manual_seed(0)
    layer = build("mlstm", dim=64, num_heads=4)
    assert_exact(layer.input_forget_bias[4:], torch.tensor([3.0, 4.0, 5.0, 6.0]), "biases of the forget gates")
    assert 0 < layer.input_forget_bias[:4].abs().max() < 0.5


def test_the_state_does_not_grow_with_the_gates():
    layer = build("mlstm", dim=16, num_heads=2)
    torch.nn.init.constant_(layer.input_forget_bias, 1e4)
    x = torch.randn(1, 9, 16)
    x[:, 5] = 0.0  # a query that is zero, where the bound exp(-m) is zero too
    x.requires_grad_()
    y, state = layer(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert y.isfinite().all()
    assert gradient.isfinite().all()
    assert_exact(y[:, 5], torch.zeros(1, 16), "the output for a query that is zero")
    assert state.tensor("max").min() > 9e3
    assert state.tensor("sums").abs().max() < 100
