"""Sentences about a gap, made of numbers whose answer is known; ranges of positions."""

import numpy as np
import pytest

from subquad.adaptation.conversion_report import explain, reach_of
from subquad.adaptation.measure import _loss
from subquad.adaptation.source import Tokens
from subquad.evaluation.text import Evaluation, PositionLoss

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
        "In ranges of 8 tokens of context or more, where a replaced layer's softmax does not see all and what came "
        "before reaches a token layer upon layer and through latents alone, the gap is +0.2000 a token; in the ranges "
        "before them it is +0.0000."
    )
    assert said[2] == (
        "Switched off, each branch changes the loss by: window +1.5000, latents +0.0040; idle (less than 0.01 nats): "
        "latents."
    )


def test_a_half_of_the_gap_within_reach_is_said():
    said = explain(report((0.3, 0.1), "window", kept=[4], width=15))
    assert said[1].startswith("In ranges of 15 tokens")
    assert "layer upon layer and through the kept layers alone, the gap is +0.1000" in said[1]
    assert said[1].endswith("before them it is +0.3000.")


def test_a_reach_before_or_after_all_ranges_is_told_too():
    assert explain(report(attention="window", width=1))[1].endswith("the gap is +0.1500 a token.")
    assert explain(report(attention="window", width=99))[1].startswith("No range has 99 tokens of context or more")
    gained = report((0.0, -0.2), attention="window", width=33)
    assert explain(gained)[0].startswith("The result gains 0.1500")
    assert explain(gained)[1].startswith("No range has 33 tokens of context or more")


def test_a_branch_that_harms_is_not_called_idle(monkeypatch):
    monkeypatch.setitem(BRANCHES[1], "loss", 1.9)
    assert explain(report())[-1].endswith("idle (less than 0.01 nats): latents; better without: window.")


@pytest.mark.parametrize(("attention", "options"), [("linear", {}), ("llp", {"segment": 8})])
def test_no_place_is_named_where_there_is_none(attention, options):
    gaps = (-0.1, -0.1) if options else (0.1, 0.1)
    said = explain(report(gaps, attention, **options))
    assert len(said) == 2
    assert said[0].startswith("The result gains 0.1000" if options else "The result loses 0.1000")


def test_the_reach_is_the_option_or_its_default():
    assert reach_of("llp", {}) == 256
    assert reach_of("llp", {"segment": 8}) == 8
    assert reach_of("linear", {}) is None


def test_the_last_token_of_a_window_is_no_range_of_its_own():
    parts = (PositionLoss(1, 2, 4, 3.0), PositionLoss(2, 4, 8, 2.0), PositionLoss(4, 5, 4, 5.0))
    found = Evaluation(16, 2.5, 12.0, None, None, parts, 4, 4, 10, None, None, 0.1)
    ranges = _loss(found)["by_position"]
    assert ranges == [
        {"start": 1, "stop": 2, "tokens": 4, "loss": 3.0},
        {"start": 2, "stop": 5, "tokens": 12, "loss": 3.0},
    ]


@pytest.mark.parametrize("start", [None, 9])
def test_tokens_in_their_file_are_those_of_the_whole_text(start):
    stored = np.array([3, 0, 5, 6, 0, 7], dtype=np.uint16)
    whole = stored.astype(np.int64)
    if start is not None:
        whole = np.concatenate([[start], np.where(whole == 0, start, whole)])
    tokens = Tokens(stored, start, 0)
    assert len(tokens) == len(whole)
    for begin in range(len(whole)):
        for stop in range(begin, len(whole) + 1):
            assert tokens.part(begin, stop).tolist() == whole[begin:stop].tolist()
