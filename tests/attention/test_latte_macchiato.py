import pytest
import torch

from subquad import attention
from subquad.attention.base import split
from subquad.attention.laws import Law
from subquad.testing import AttentionContract, assert_exact, assert_same_maths
from tests.attention.oracles import attend, heads, projected


class TestLatteMacchiato(AttentionContract):
    name = "latte_macchiato"
    options = {"num_latents": 6, "width": 7}

    def oracle(self, layer, x_TD):
        """One softmax over the window and the latents that are open."""
        H, width, closed, rows = self.num_heads, layer.config.width, layer.closed, []
        q, k, v = projected(layer, x_TD)
        shares, logits = heads(layer.latent_query(x_TD), H), heads(layer.latent_key(x_TD), H)
        for t in range(len(x_TD)):
            row, near = [], slice(max(0, t - width + 1), t + 1)
            for h in range(H):
                p = shares[h][t].exp()
                p[0] *= "window" not in closed
                p[1:] *= "latents" not in closed
                p /= p.sum()
                w_SL = logits[h][: t + 1].exp() / logits[h][: t + 1].exp().sum(0)
                far = sum(p[1 + a] * (w_SL[:, a] @ v[h][: t + 1]) for a in range(w_SL.shape[1]))
                row.append(p[0] * attend(q[h][t], k[h][near], v[h][near]) + far)
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestLatteMacchiatoOfSharedHeads(TestLatteMacchiato):
    """One head of keys and values in the window, whose values the latents mix too, and no rotary positions."""

    name = "latte_macchiato"
    options = {"num_latents": 6, "width": 7, "num_kv_heads": 1, "rope": False}
    laws = (Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.DOCUMENTS, Law.RANKS)


class TestLatteMacchiatoWithoutItsWindow(TestLatteMacchiato):
    """A closed branch leaves the state as it is and changes the weights."""

    name = "latte_macchiato"
    options = {"num_latents": 6, "width": 7}
    laws = (Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.PRECISION, Law.RANKS)
    branch = "window"

    def new(self, num_heads):
        layer = super().new(num_heads)
        layer.closed = frozenset([self.branch])
        return layer


class TestLatteMacchiatoWithoutItsLatents(TestLatteMacchiatoWithoutItsWindow):
    branch = "latents"


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return attention.build("latte_macchiato", dim=16, num_heads=2, num_latents=6, width=5).double()


def test_without_its_latents_it_is_window_attention(layer):
    window = attention.build("window", dim=16, num_heads=2, width=5, rope=True).double()
    window.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("latent_")})
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    with layer.without("latents"):
        assert_same_maths(layer(x)[0], window(x)[0], "the window alone")


def test_without_its_window_the_shares_are_a_softmax_over_the_latents(layer):
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    (logits,) = split(4, layer.latent_query(x))
    with layer.without("window"):
        assert_same_maths(layer.shares(x)[..., 1:], logits[..., 1:].softmax(-1), "the shares of the latents")
    assert_exact(layer.shares(x), logits.softmax(-1), "open again after the block")


def test_a_branch_may_be_closed_between_two_tokens(layer):
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    _, opened = layer(x[:, :20])
    for branch in layer.branches:
        with layer.without(branch):
            _, closed = layer(x[:, :20])
            first, state = layer(x[:, 20:24], opened)
            whole = layer(x)[0]
        for name in ("near_keys", "near_values", "far_lse", "far_mean"):
            assert_exact(closed.tensor(name), opened.tensor(name), name)
        assert_same_maths(first, whole[:, 20:24], f"a piece without its {branch}")
        assert_same_maths(layer(x[:, 24:], state)[0], layer(x)[0][:, 24:], "open again")


def test_one_known_branch_stays_open(layer):
    with pytest.raises(ValueError, match=r"no branch 'windows'; did you mean 'window'\? valid: latents, window"):
        layer.without("windows").__enter__()
    with layer.without("window"), pytest.raises(ValueError, match="'latte_macchiato' must stay open, got latents,"):
        layer.without("latents").__enter__()
    assert layer.closed == frozenset()
