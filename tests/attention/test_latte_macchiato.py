import pytest
import torch

from subquad import attention
from subquad.testing import AttentionContract, assert_exact, assert_same_maths


class TestLatteMacchiato(AttentionContract):
    name = "latte_macchiato"
    with_inductor = False
    options = {"num_latents": 6, "width": 7}


class TestLatteMacchiatoOfSharedHeads(AttentionContract):
    """One head of keys and values in the window, whose values the latents mix too."""

    name = "latte_macchiato"
    with_inductor = False
    options = {"num_latents": 6, "width": 7, "num_kv_heads": 1, "rope": False}


class Closed(AttentionContract):
    name = "latte_macchiato"
    with_inductor = False
    options = {"num_latents": 6, "width": 7}
    branch = ""

    def new(self, num_heads):
        layer = super().new(num_heads)
        layer.closed = frozenset([self.branch])
        return layer


class TestLatteMacchiatoWithoutItsWindow(Closed):
    branch = "window"


class TestLatteMacchiatoWithoutItsLatents(Closed):
    branch = "latents"


del Closed  # it names no branch


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


def test_without_its_window_a_change_there_reaches_a_token_through_latents_alone(layer):
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    with layer.without("window"):
        w_BHTS = layer.weights(x)
        latents = layer.split(layer.latent_query(x))[..., 1:].softmax(-1)
        assert_same_maths(layer.shares(x)[..., 1:], latents, "the shares of the latents")
    assert_same_maths(w_BHTS.sum(-1), torch.ones_like(w_BHTS[..., 0]), "rows")
    assert_exact(layer.shares(x), layer.split(layer.latent_query(x)).softmax(-1), "open again after the block")


def test_a_branch_may_be_closed_between_two_tokens(layer):
    """The state is the same whatever is closed: what follows a closed piece is what follows an open one."""
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    _, opened = layer(x[:, :20])
    for branch in layer.branches:
        with layer.without(branch):
            _, closed = layer(x[:, :20])
            first, state = layer(x[:, 20:24], opened)
            whole = layer(x)[0]
        for name in ("keys", "values", "lse", "mean"):
            assert_exact(closed.tensor(name), opened.tensor(name), name)
        assert_same_maths(first, whole[:, 20:24], f"a piece without its {branch}")
        assert_same_maths(layer(x[:, 24:], state)[0], layer(x)[0][:, 24:], "open again")


def test_what_cannot_be_closed(layer):
    unknown = pytest.raises(
        ValueError, match=r"has no branch 'windows'; did you mean 'window'\? valid: latents, window"
    )
    with unknown, layer.without("windows"):
        pass
    none_open = pytest.raises(
        ValueError, match="one branch of attention 'latte_macchiato' must stay open, got latents,"
    )
    with none_open, layer.without("window"), layer.without("latents"):
        pass
    assert layer.closed == frozenset()
