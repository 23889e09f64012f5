import logging

import pytest
import torch

from subquad.attention import build
from subquad.attention.elita import INIT, _warn_beyond
from subquad.attention.laws import Law
from subquad.testing import AttentionContract, assert_exact
from tests.attention.oracles import agrees, heads

SIZES = {"dim": 16, "num_heads": 2}


class TestElita(AttentionContract):
    """Most tests read past the horizon."""

    judged_together = 3

    name = "elita"
    options = {"horizon": 40}
    oracle_tokens = 45

    def oracle(self, layer, x_TD):
        """Attention2 as the equations print it; on the diagonal as the text says ("Intuition")."""
        config, rows = layer.config, []
        span = config.horizon - (config.time == "i/(N-1)")
        k1, k2, v = layer.key(x_TD), layer.self_key(x_TD), heads(layer.value(x_TD), config.num_heads)
        k3 = layer.query(x_TD) if layer.query is not None else torch.zeros_like(k1)

        def term(which, i, h):
            if not config.positions:
                return 0.0
            return torch.sin(layer.frequency[which, h] * i / span + layer.phase[which, h]) @ layer.amplitude[h]

        for t in range(len(x_TD)):
            row = []
            for h in range(config.num_heads):
                X_S = torch.stack([(k1[s, h] + term(0, s, h)).exp() for s in range(t + 1)])
                if config.self_term == "diagonal":
                    X_S[t] *= k2[t, h].exp()
                    row.append(X_S @ v[h][: t + 1] / X_S.sum())
                    continue
                past, own = (term(1, t, h) + k3[t, h]).exp(), k2[t, h].exp()
                row.append((own * v[h][t] + past * (X_S @ v[h][: t + 1])) / (own + past * X_S.sum()))
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestElitaOnTheDiagonal(TestElita):
    """The README's Intuition: a running softmax of the tokens before, not the fused gate."""

    judged_together = 6

    name = "elita"
    options = {"horizon": 40, "self_term": "diagonal"}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.BLOCK_SIZES, Law.PADDING,
        Law.NO_FUTURE, Law.PRECISION, Law.DOCUMENTS, Law.RANKS,
    )  # fmt: skip


@pytest.mark.parametrize("options", [
    {"time": "i/(N-1)"}, {"query_term": False}, {"positions": False}, {"positions": False, "self_term": "diagonal"},
])  # fmt: skip
def test_the_oracle_agrees_with_each_option(options):
    agrees(TestElita, position_width=5, bias=True, **options)


def test_the_diagonal_has_only_the_parameters_that_do_not_cancel():
    layer = build("elita", **SIZES, self_term="diagonal")
    sizes = {name: list(p.shape) for name, p in layer.named_parameters() if p.ndim != 2 or len(p) == 2}
    assert sizes == {
        "key.weight": [2, 16], "self_key.weight": [2, 16], "amplitude": [2, 16],
        "frequency": [1, 2, 16], "phase": [1, 2, 16],
    }  # fmt: skip
    p1_HT, p2_HT = layer.position_terms(5)
    assert p1_HT.any()
    assert_exact(p2_HT, torch.zeros(2, 5))


def test_position_terms_are_what_the_logits_add():
    torch.manual_seed(0)
    layer = build("elita", **SIZES, horizon=8).double()
    for parameter in (layer.frequency, layer.phase, layer.amplitude):
        torch.nn.init.normal_(parameter)
    p1_HT, p2_HT = layer.position_terms(20)
    assert p1_HT.shape == p2_HT.shape == (2, 20)
    key, gate = layer.logits(torch.zeros(1, 20, 16, dtype=torch.float64), 0)
    assert_exact(key[0, ..., 0], p1_HT)
    assert_exact(gate[0, ..., 0], p2_HT)
    later_key, _ = layer.logits(torch.zeros(2, 4, 16, dtype=torch.float64), torch.tensor([0, 16]))
    assert_exact(later_key[1, ..., 0], p1_HT[:, 16:])
    assert_exact(later_key[0, ..., 0], p1_HT[:, :4])
    without = build("elita", **SIZES, positions=False)
    for p_HT in without.position_terms(5):
        assert_exact(p_HT, torch.zeros(2, 5))
    assert not {"frequency", "phase", "amplitude"} & set(dict(without.named_parameters()))


def test_vectors_begin_uniform_and_small():
    torch.manual_seed(0)
    layer = build("elita", dim=64, num_heads=4, position_width=64)
    modules = (layer.key, layer.self_key, layer.query)
    for parameter in (*(m.weight for m in modules), layer.frequency, layer.phase, layer.amplitude):
        assert INIT / 2 < parameter.abs().max() <= INIT


def test_reading_real_tokens_past_the_horizon_warns_once(caplog):
    _warn_beyond.cache_clear()
    layer = build("elita", **SIZES, horizon=8)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, :4] = False
    with caplog.at_level(logging.WARNING, "subquad"):
        layer(torch.randn(2, 12, 16), mask=mask)
        _, state = layer(torch.randn(1, 8, 16))
        layer.cost(9)
        build("elita", **SIZES, horizon=8).to("meta")(torch.zeros(1, 9, 16, device="meta"))
        build("elita", **SIZES, horizon=8, positions=False)(torch.randn(1, 9, 16))
        assert not caplog.records
        for _ in range(3):
            _, state = layer(torch.randn(1, 1, 16), state)
        mask[0, 0] = True
        build("elita", **SIZES, horizon=8)(torch.randn(1, 9, 16))
        _warn_beyond.cache_clear()
        mask[0, 0] = True
        build("elita", **SIZES, horizon=8)(torch.randn(2, 12, 16), mask=mask)
    expected = "elita reads beyond its horizon of 8 tokens: position terms are extrapolated"
    assert [record.getMessage() for record in caplog.records] == [expected, expected]
