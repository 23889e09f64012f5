import torch

from subquad.attention import build
from subquad.attention.laws import Law
from subquad.testing import AttentionContract, assert_exact
from tests.attention.oracles import agrees, heads, softplus, standardised


class TestMlstm(AttentionContract):
    name = "mlstm"

    def oracle(self, layer, x_TD):
        """Equations 19 to 27, without m."""
        config, o = layer.config, []
        H = config.num_heads
        q, k, v = (heads(project(x_TD), H) for project in (layer.query, layer.key, layer.value))
        log_i, z = (layer.input_forget(x_TD) + layer.input_forget_bias).chunk(2, -1)
        for h in range(H):
            log_f_T = -softplus(-z[:, h])
            o_TV = self.outputs(q[h], k[h] / config.keys**0.5, v[h], log_i[:, h], log_f_T)
            o.append(standardised(o_TV, config.norm_eps))
        y_TC = torch.cat(o, -1) * layer.norm_weight
        return layer.out(y_TC / (1 + (-layer.gating(x_TD)).exp()))

    def outputs(self, q_TK, k_TK, v_TV, log_i_T, log_f_T):
        S, n = torch.zeros(k_TK.shape[1], v_TV.shape[1]).double(), torch.zeros(k_TK.shape[1]).double()
        rows, totals = [], []
        for t in range(len(q_TK)):
            f, i = log_f_T[t].exp(), log_i_T[t].exp()
            S, n = f * S + i * torch.outer(k_TK[t], v_TV[t]), f * n + i * k_TK[t]
            totals.append(abs(q_TK[t] @ n))
            rows.append(q_TK[t] @ S / max(totals[-1], 1))
        assert min(totals) < 1 < max(totals), "both sides of the maximum are tried"
        return torch.stack(rows)


class TestMlstmWithLargeGates(TestMlstm):
    """Logarithms of gates up to hundreds, whose exponentials only float64 holds."""

    name = "mlstm"
    options = {}
    gates = 100.0
    laws = (
        Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.BLOCK_SIZES, Law.PADDING, Law.NO_FUTURE, Law.DOCUMENTS,
        Law.RANKS,
    )  # fmt: skip
    # Almost all weight is on one token, and the definition divides its q . k by itself; a state must sum both apart.
    test_precision_of_each_backend_and_dtype_stays_in_budget = None
    test_precision_under_autocast_stays_in_budget = None

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
    laws = (Law.DEFINITION, Law.SPLIT, Law.NO_FUTURE, Law.LONG, Law.RANKS)

    def outputs(self, q_TK, k_TK, v_TV, log_i_T, log_f_T):
        """As sums over s, both sides of the fraction divided by exp(m), which float64 does not hold."""
        rows = []
        for t in range(len(q_TK)):
            d_S = torch.stack([log_i_T[s] + log_f_T[s + 1 : t + 1].sum() for s in range(t + 1)])
            w_S = (k_TK[: t + 1] @ q_TK[t]) * (d_S - d_S.max()).exp()
            rows.append(w_S @ v_TV[: t + 1] / max(abs(w_S.sum()), (-d_S.max()).exp()))
        return torch.stack(rows)


def test_the_oracle_agrees_on_other_widths():
    agrees(TestMlstm, key_channels=5, value_channels=3, bias=True)


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
    assert state.tensor("sums_max").min() > 9e3
    assert state.tensor("sums").abs().max() < 100
