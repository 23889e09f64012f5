import logging

import pytest
import torch

from subquad.attention import build
from subquad.attention.elita import INIT
from subquad.testing import AttentionContract, assert_exact, assert_same_maths

SIZES = {"dim": 16, "num_heads": 2}


class TestElita(AttentionContract):
    """Most tests read past the horizon."""

    name = "elita"
    with_inductor = False
    options = {"horizon": 40}


def layer_with_large_positions(**options):
    torch.manual_seed(0)
    layer = build("elita", **SIZES, **options).double()
    for parameter in (layer.frequency, layer.phase, layer.amplitude):
        torch.nn.init.normal_(parameter)
    return layer


def test_position_terms_are_what_the_logits_add():
    layer = layer_with_large_positions(horizon=8)
    p1_HT, p2_HT = layer.position_terms(20)
    assert p1_HT.shape == p2_HT.shape == (2, 20)
    key, gate = layer.logits(torch.zeros(1, 20, 16, dtype=torch.float64), 0)
    assert_exact(key[0, ..., 0], p1_HT)
    assert_exact(gate[0, ..., 0], p2_HT)
    later_key, _ = layer.logits(torch.zeros(2, 4, 16, dtype=torch.float64), torch.tensor([0, 16]))
    assert_exact(later_key[1, ..., 0], p1_HT[:, 16:])
    assert_exact(later_key[0, ..., 0], p1_HT[:, :4])


def test_without_positions_there_are_no_position_terms():
    layer = build("elita", **SIZES, positions=False)
    for p_HT in layer.position_terms(5):
        assert_exact(p_HT, torch.zeros(2, 5))
    assert not {"frequency", "phase", "amplitude"} & set(dict(layer.named_parameters()))


def test_time_runs_to_one_at_the_horizon_or_at_its_last_token():
    equations, code = (layer_with_large_positions(horizon=8, time=time) for time in ("i/N", "i/(N-1)"))
    for ours, theirs in zip(equations.position_terms(9), code.position_terms(9), strict=True):
        assert_same_maths(ours[:, 8], theirs[:, 7], "t = 1")
        assert not torch.equal(ours[:, 7], theirs[:, 7])


def test_outputs_do_not_depend_on_the_length_of_the_sequence():
    layer = layer_with_large_positions(horizon=8)
    x = torch.randn(1, 30, 16, dtype=torch.float64)
    assert_same_maths(layer(x)[0][:, :5], layer(x[:, :5])[0], "a prefix")


def test_vectors_begin_uniform_and_small():
    torch.manual_seed(0)
    layer = build("elita", dim=64, num_heads=4, position_width=64)
    modules = (layer.key, layer.self_key, layer.query)
    for parameter in (*(m.weight for m in modules), layer.frequency, layer.phase, layer.amplitude):
        assert INIT / 2 < parameter.abs().max() <= INIT


def test_reading_past_the_horizon_warns_once(caplog):
    layer = build("elita", **SIZES, horizon=8)
    with caplog.at_level(logging.WARNING, "subquad"):
        _, state = layer(torch.randn(1, 8, 16))
        assert not caplog.records
        for _ in range(3):
            _, state = layer(torch.randn(1, 1, 16), state)
        build("elita", **SIZES, horizon=8, positions=False)(torch.randn(1, 9, 16))
    (record,) = caplog.records
    expected = "elita reads token 9, beyond its horizon of 8 tokens: position terms are extrapolated"
    assert record.getMessage() == expected


def test_the_cost_of_a_longer_sequence_is_no_reading_past_the_horizon(caplog):
    layer = build("elita", **SIZES, horizon=32)
    with caplog.at_level(logging.WARNING, "subquad"):
        layer.cost(64)
        build("elita", **SIZES, horizon=32).to("meta")(torch.zeros(1, 64, 16, device="meta"))
        assert not caplog.records
        for _ in range(2):
            layer(torch.randn(1, 64, 16))
    assert len(caplog.records) == 1


def test_padding_does_not_count_towards_the_horizon(caplog):
    layer = build("elita", **SIZES, horizon=8)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, :4] = False
    with caplog.at_level(logging.WARNING, "subquad"):
        layer(torch.randn(2, 12, 16), mask=mask)
        assert not caplog.records
        mask[0, 0] = True
        layer(torch.randn(2, 12, 16), mask=mask)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"horizon": 1}, "horizon must be at least 2, got 1"),
        ({"position_width": 0}, "position_width must be at least 1, got 0"),
        ({"time": "i"}, r"time must be one of its choices, got 'i'.*valid: i/\(N-1\), i/N"),
        ({"causal": False}, "attention 'elita' has no bidirectional form; it has: causal"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        build("elita", **SIZES, **options)
