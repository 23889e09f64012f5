"""Sentences about a gap, made of numbers whose answer is known, and the picture."""

import pytest

from subquad.adaptation.conversion_report import draw, explain, reach_of

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


def test_a_gap_within_reach_is_told_apart_and_kept_layers_are_a_way():
    said = explain(report((0.3, 0.1), "window", kept=[4], width=15))[1]
    assert said.startswith("With 15 tokens")
    assert "through stacked layers and the kept layers: there the gap is +0.1000" in said
    assert said.endswith("with less context +0.3000.")


def test_a_reach_before_or_after_all_ranges_is_told_too():
    assert explain(report(attention="window", width=1))[1].endswith("the gap is +0.1500 nats a token.")
    assert explain(report(attention="window", width=99))[1].startswith("No range has 99 tokens of context or more")
    gained = explain(report((0.0, -0.2), attention="window", width=33))
    assert gained[0].startswith("The result gains 0.1500")
    assert gained[1].startswith("No range has 33 tokens of context or more")


def test_a_harmful_branch_is_not_called_idle(monkeypatch):
    monkeypatch.setitem(BRANCHES[1], "loss", 1.9)
    assert explain(report())[-1].endswith("idle (less than 0.01 nats): latents; better without: window.")


@pytest.mark.parametrize(("attention", "options", "gap"), [("linear", {}, 0.1), ("llp", {"segment": 8}, -0.1)])
def test_no_place_is_named_without_a_reach_or_a_loss(attention, options, gap):
    said = explain(report((gap, gap), attention, **options))
    assert len(said) == 2
    assert said[0].startswith("The result loses 0.1000" if gap > 0 else "The result gains 0.1000")


def test_the_reach_is_the_option_or_its_default():
    assert [reach_of("llp", {}), reach_of("llp", {"segment": 8}), reach_of("linear", {})] == [256, 8, None]


def test_a_report_without_decoding_is_drawn(tmp_path):
    draw(report(width=8), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
