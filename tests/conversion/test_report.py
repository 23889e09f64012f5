"""Sentences about a gap, made of numbers whose answer is known; ranges of positions."""

import pytest

from subquad.conversion.explain import explain, softmax_reach
from subquad.conversion.measure import _loss
from subquad.evaluation import Evaluation, PositionLoss

BRANCHES = [{"off": name, "loss": loss} for name, loss in (("nothing", 2.0), ("window", 3.5), ("latents", 2.004))]


def report(gaps=(0.0, 0.2), attention="latte_macchiato", kept=(), **options):
    parts = [
        {"start": 1, "stop": 16, "tokens": 100, "gap": gaps[0]},
        {"start": 16, "stop": 33, "tokens": 300, "gap": gaps[1]},
    ]
    return {
        "attention": attention,
        "options": options,
        "layers": {"replaced": [1], "kept": list(kept)},
        "stages": [{"perplexity": 6.0}, {"perplexity": 7.389, "branches": BRANCHES}],
        "gap": {"loss": (gaps[0] * 100 + gaps[1] * 300) / 400, "by_position": parts},
    }


def test_a_gap_is_told_with_its_place_and_its_branches():
    said = explain(report(width=8))
    assert said[0] == "The result loses 0.1500 nats a token: perplexity 6.000 became 7.389."
    assert said[1] == (
        "100% of it stands in ranges of 8 tokens of context or more, where a replaced layer's softmax does not see all:"
        " what came before reaches a token layer upon layer and through latents alone. In the ranges before them the "
        "gap is +0.0000 a token."
    )
    assert said[2] == (
        "Switched off, each branch changes the loss by: window +1.5000, latents +0.0040; idle (less than 0.01 nats): "
        "latents."
    )


def test_a_half_of_the_gap_within_reach_is_said():
    said = explain(report((0.3, 0.1), "window", kept=[4], width=15))
    assert said[1].startswith("50% of it stands in ranges of 15 tokens")
    assert "layer upon layer and through the kept layers alone" in said[1]


@pytest.mark.parametrize(("attention", "options"), [("linear", {}), ("llp", {"segment": 8})])
def test_no_place_is_named_where_there_is_none(attention, options):
    gaps = (-0.1, -0.1) if options else (0.1, 0.1)
    said = explain(report(gaps, attention, **options))
    assert len(said) == 2
    assert said[0].startswith("The result gains 0.1000" if options else "The result loses 0.1000")


def test_the_reach_is_the_option_or_its_default():
    assert softmax_reach(report(attention="llp")) == 256
    assert softmax_reach(report(attention="llp", segment=8)) == 8
    assert softmax_reach(report(attention="linear")) is None


def test_the_last_token_of_a_window_is_no_range_of_its_own():
    parts = (PositionLoss(1, 2, 4, 3.0), PositionLoss(2, 4, 8, 2.0), PositionLoss(4, 5, 4, 5.0))
    found = Evaluation(16, 2.5, 12.0, None, None, parts, 4, 4, 10, None, None, 0.1)
    ranges = _loss(found)["by_position"]
    assert ranges == [
        {"start": 1, "stop": 2, "tokens": 4, "loss": 3.0},
        {"start": 2, "stop": 5, "tokens": 12, "loss": 3.0},
    ]
