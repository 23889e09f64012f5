import pytest
import torch
from torch.nn import functional as F

from subquad.attention import build
from subquad.attention.laws import Law
from subquad.attention.past import Past
from subquad.testing import AttentionContract, assert_exact, assert_same_maths
from tests.attention.kept import kept
from tests.attention.oracles import convolved, heads, recurrence, rms, silu, softplus

SIZES = {"dim": 16, "num_heads": 4, "state_channels": 5}


def make(**options):
    torch.manual_seed(0)
    layer = build("mamba2", **SIZES, **options).double()
    with torch.no_grad():
        layer.skip.normal_()
        layer.norm_weight.normal_()
        layer.convolution.bias.normal_()
    return layer


def draw(tokens=11):
    return torch.randn(2, tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class TestMamba2(AttentionContract):
    """Skips that differ between heads: of equal ones, as at first, the norm leaves a gradient that is almost zero."""

    name = "mamba2"

    def new(self, num_heads):
        layer = super().new(num_heads)
        torch.nn.init.normal_(layer.skip)
        return layer

    def oracle(self, layer, x_TD):
        config = layer.config
        H, G = config.num_heads, config.groups
        C, B, x = convolved(layer, x_TD)
        C, B, x = heads(C, G), heads(B, G), heads(x, H)
        d_TH = softplus(layer.stepping(x_TD) + layer.rate.step_bias)
        d_TH = d_TH if config.step_limits is None else d_TH.clamp(*config.step_limits)
        f_TH, o = (-layer.rate.log_rate.exp() * d_TH).exp(), []
        for h in range(H):
            C_TK, B_TK, d_T1, f_T1 = C[h * G // H], B[h * G // H], d_TH[:, h, None], f_TH[:, h, None]
            o.append(recurrence(C_TK, d_T1 * B_TK, x[h], f_T1.expand_as(B_TK)) + layer.skip[h] * x[h])
        gated = torch.cat(o, -1) * silu(layer.gating(x_TD))
        return layer.out(torch.cat([rms(y, config.norm_eps) for y in heads(gated, G)], -1) * layer.norm_weight)


class TestMamba2WithGroups(TestMamba2):
    """Queries and keys of two groups of heads, a norm by group, and limited steps."""

    name = "mamba2"
    num_heads = 4
    fewest_heads = 2
    options = {"groups": 2, "state_channels": 6, "expand": 3, "convolution": 2, "step_limits": (0.01, 0.05)}
    laws = (Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.PRECISION, Law.DOCUMENTS, Law.RANKS)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_the_papers_recurrence_token_by_token(groups):
    """With one projection, whose rows are z, x, B, C, d, and a convolution over x, B, C, as in checkpoints."""
    layer, u = make(groups=groups), draw()
    projections = (layer.gating, layer.value, layer.key, layer.query, layer.stepping)
    z, *xBC, d = F.linear(u, torch.cat([p.weight for p in projections])).split(
        [p.out_features for p in projections], -1
    )
    state = 5 * groups
    weight, bias = (torch.cat(list(p.split([state, state, 32]))[::-1]) for p in layer.convolution.parameters())
    # The two states have changed places: C, B, x is x, B, C backwards.
    xBC = F.silu(F.conv1d(F.pad(torch.cat(xBC, -1).mT, (3, 0)), weight[:, None], bias, groups=len(weight)).mT)
    x, B, C = xBC.split([32, state, state], -1)
    x, B, C = x.unflatten(-1, (4, 8)), *(y.unflatten(-1, (groups, 5)).repeat_interleave(4 // groups, 2) for y in (B, C))
    d = F.softplus(d + layer.rate.step_bias)
    S, outputs = torch.zeros(2, 4, 5, 8, dtype=torch.float64), []
    for t in range(u.shape[1]):
        S = torch.exp(-layer.rate.log_rate.exp() * d[:, t])[..., None, None] * S
        S = S + d[:, t, :, None, None] * B[:, t, :, :, None] * x[:, t, :, None]
        outputs.append((C[:, t, :, None] @ S)[:, :, 0] + layer.skip[:, None] * x[:, t])
    y = (torch.stack(outputs, 1).flatten(2) * F.silu(z)).unflatten(-1, (groups, -1))
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2) * layer.norm_weight
    assert_same_maths(layer(u)[0], layer.out(y), "outputs")


def test_groups_are_copies_for_their_heads():
    layer, copies = make(groups=2), make(groups=4)
    copies.load_state_dict(layer.state_dict() | {
        name: weight.unflatten(0, (2, 5)).repeat_interleave(2, 0).flatten(0, 1)
        for name, weight in layer.named_parameters() if name.startswith(("query", "key"))
    } | {
        name: torch.cat([*(y.unflatten(0, (2, 5)).repeat_interleave(2, 0).flatten(0, 1) for y in (C, B)), x])
        for name, weight in layer.named_parameters() if name.startswith("convolution")
        for C, B, x in [weight.split([10, 10, 32])]
    })  # fmt: skip
    u = draw()
    assert_same_maths(layer.weights(u), copies.weights(u), "weights")
    out, expected = (each.mix(u, Past(u, None, None)) for each in (layer, copies))
    assert_same_maths(out, expected, "outputs of the scan")


def test_without_keys_the_skip_is_left():
    layer, u = make(), draw()
    for parameter in (layer.key.weight, layer.convolution.bias):
        torch.nn.init.zeros_(parameter)
    skips = torch.diag_embed(layer.skip[:, None].expand(4, 11)).expand(2, 4, 11, 11)
    assert_exact(layer.weights(u), skips, "weights")


def test_a_limited_step_decays_and_writes_as_it_says():
    layer, u = make(step_limits=(0.25, 0.25)), draw()
    sums, q = kept(layer, u)
    ages = (torch.arange(11)[:, None] - torch.arange(11)).clamp(min=0)
    decays = torch.exp(-0.25 * layer.rate.log_rate.exp()[:, None, None] * ages)
    expected = (0.25 * decays * (q @ sums.k.mT)).tril() + layer.skip[:, None, None] * torch.eye(11)
    assert_same_maths(layer.weights(u), expected, "weights")


def test_rates_and_steps_begin_in_the_papers_ranges():
    rate = build("mamba2", dim=256, num_heads=256).rate
    decay, step = rate.log_rate.exp().double(), F.softplus(rate.step_bias.double())
    assert 0.99 < decay.min() < 2 < 15 < decay.max() < 16.01
    assert 0.00099 < step.min() < 0.002 < 0.05 < step.max() < 0.101
    assert 0.007 < step.median() < 0.014, "log-uniform"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups must divide num_heads, got groups=3, num_heads=4"),
        ({"expand": 0}, "expand must be at least 1, got 0"),
        ({"convolution": 0}, "convolution must be at least 1, got 0"),
        ({"state_channels": 0}, "state_channels must be at least 1, got 0"),
        ({"step_limits": [0.2, 0.1]}, "step_limits must be two numbers, 0 <= least <= largest, got"),
        ({"step_limits": [0.2]}, "step_limits must be two numbers, 0 <= least <= largest, got"),
        ({"key_channels": 4}, "'mamba2' has no option 'key_channels'; .*state_channels"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("mamba2", **SIZES | options)
