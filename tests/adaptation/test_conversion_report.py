"""Sentences about a gap, made of numbers whose answer is known, and the picture."""

import re

import pytest

from subquad.adaptation.conversion_report import draw, explain

BRANCHES = [{"off": name, "loss": loss} for name, loss in (("nothing", 2.0), ("window", 3.5), ("latents", 2.004))]


def report(gaps=(0.0, 0.2), attention="latte_macchiato", kept=(), **options):
    parts = [
        {"start": 1, "stop": 16, "tokens": 100, "gap": gaps[0], "loss": 2.0},
        {"start": 16, "stop": 33, "tokens": 300, "gap": gaps[1], "loss": 1.5},
    ]
    first = {"stage": "original", "perplexity": 6.0, "loss": 1.7, "by_position": parts, "decoding": []}
    return {
        "attention": attention,
        "options": options,
        "layers": {"replaced": [1], "kept": list(kept)},
        "stages": [first, {**first, "stage": "tuned", "perplexity": 7.389, "branches": BRANCHES}],
        "gap": {"loss": (gaps[0] * 100 + gaps[1] * 300) / 400, "by_position": parts},
    }


def test_a_gap_is_told_with_its_place_and_its_branches():
    assert explain(report(width=8)) == [
        "The result loses 0.1500 nats a token: perplexity 6.000 became 7.389.",
        "With 8 tokens of context or more, a replaced layer's softmax does not see all of them, and the rest acts only "
        "through stacked layers and latents: there the gap is +0.2000 nats a token, with less context +0.0000.",
        "Change of the loss with one branch switched off: window +1.5000, latents +0.0040; idle (less than 0.01 nats): "
        "latents.",
    ]


@pytest.mark.parametrize(("gaps", "attention", "options", "expected"), [
    ((0.3, 0.1), "window", {"width": 15, "kept": [4]}, "With 15 tokens .* through stacked layers and the kept layers: "
     r"there the gap is \+0.1000 nats a token, with less context \+0.3000\."),
    ((0.0, 0.2), "window", {"width": 1}, r"the gap is \+0.1500 nats a token\."),
    ((0.0, 0.2), "window", {"width": 99}, "No range has 99 tokens of context or more: a replaced"),
    ((0.0, -0.2), "window", {"width": 33}, "No range has 33 tokens of context or more"),
    ((0.0, 0.2), "llp", {}, "No range has 256 tokens of context or more"),  # the default segment
    ((0.1, 0.1), "linear", {}, "Change of the loss"),  # no reach
    ((-0.1, -0.1), "llp", {"segment": 8}, "Change of the loss"),  # no loss
])  # fmt: skip
def test_the_place_of_a_gap_is_told_if_there_is_one(gaps, attention, options, expected):
    said = explain(report(gaps, attention, **options))
    assert said[0].startswith("The result gains" if gaps[1] < 0 else "The result loses")
    assert re.search(expected, said[1])


def test_a_harmful_branch_is_not_called_idle(monkeypatch):
    monkeypatch.setitem(BRANCHES[1], "loss", 1.9)
    assert explain(report())[-1].endswith("idle (less than 0.01 nats): latents; better without: window.")


def test_a_report_without_decoding_is_drawn(tmp_path):
    draw(report(width=8), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
