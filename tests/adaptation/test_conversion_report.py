"""Sentences about a gap, made of numbers whose answer is known, and the picture."""

import re

import pytest

from subquad.adaptation.conversion_report import draw, explain
from subquad.evaluation import drawing

BRANCHES = [{"off": name, "loss": loss} for name, loss in (("nothing", 2.0), ("window", 3.5), ("latents", 2.004))]


def decoding(speeds, sizes):
    rows = zip((512, 1024, 2048), speeds, sizes, strict=True)
    return [{"context": c, "tokens_per_second": speed, "state_bytes": size} for c, speed, size in rows]


def report(gaps=(0.0, 0.2), attention="latte_macchiato", kept=(), before=(), after=(), **options):
    parts = [
        {"start": 1, "stop": 16, "tokens": 100, "gap": gaps[0], "loss": 2.0},
        {"start": 16, "stop": 33, "tokens": 300, "gap": gaps[1], "loss": 1.5},
    ]
    first = {"stage": "original", "perplexity": 6.0, "loss": 1.7, "by_position": parts, "decoding": before}
    return {
        "attention": attention,
        "options": options,
        "layers": {"replaced": [1], "kept": list(kept)},
        "stages": [first, {**first, "stage": "tuned", "perplexity": 7.389, "branches": BRANCHES, "decoding": after}],
        "gap": {"loss": (gaps[0] * 100 + gaps[1] * 300) / 400, "by_position": parts},
    }


def test_a_gap_is_told_with_its_place_and_its_branches():
    assert explain(report(width=8)) == [
        "The result loses 0.1500 nats a token: perplexity 6.000 became 7.389.",
        "With 8 tokens of context or more, a replaced layer's softmax does not see all of them, and the rest acts only "
        "through stacked layers and latents: there the gap is +0.2000 nats a token, with less context +0.0000.",
        "Change of the loss with one branch switched off: window +1.5000, latents +0.0040; idle (less than 0.01 nats): "
        "latents.",
        "Decoding was not measured, so it is not known from which context on the conversion pays.",
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
    assert explain(report())[-2].endswith("idle (less than 0.01 nats): latents; better without: window.")


ORIGINAL = decoding((100.0, 80.0, 50.0), (1000, 2000, 4000))


@pytest.mark.parametrize(("speeds", "sizes", "expected"), [
    ((60.0, 82.0, 75.0), (1500, 1500, 1500),
     "The state is smaller from 1,024 tokens of context on, and decoding is faster from 2,048 tokens of context on: at "
     "2,048 tokens 0.38 times the original's bytes and 1.5 times its speed. Decoding got slower at 512 tokens: 0.6 "
     "times the speed at 512."),
    ((90.0, 60.0, 45.0), (1000, 2000, 4000),
     "The state is smaller at none of the measured lengths, and decoding is faster at none of the measured lengths: at "
     "2,048 tokens 1 times the original's bytes and 0.9 times its speed. Decoding got slower at 512, 1,024, 2,048 "
     "tokens: 0.75 times the speed at 1,024."),
    ((200.0, 160.0, 100.0), (10, 10, 10),
     "The state is smaller from 512 tokens of context on, the shortest measured, and decoding is faster from 512 "
     "tokens of context on, the shortest measured: at 2,048 tokens 0.0025 times the original's bytes and 2 times its "
     "speed."),
    ((200.0, 82.0, 52.0), (10, 10, 4000),
     "The state is smaller at none of the measured lengths, and decoding is faster at none of the measured lengths: at "
     "2,048 tokens 1 times the original's bytes and 1 times its speed."),
], ids=["later", "never", "always", "not at the end"])  # fmt: skip
def test_the_last_sentence_says_from_which_context_on_the_conversion_pays(speeds, sizes, expected):
    assert explain(report(before=ORIGINAL, after=decoding(speeds, sizes)))[-1] == expected


@pytest.mark.parametrize("sizes", [(300_000, 310_000, 320_000), (1024, 1024, 1024), (1, 10**6, 10**9)])
def test_the_axis_of_the_state_has_numbers(tmp_path, monkeypatch, sizes):
    figures = []
    monkeypatch.setattr(drawing, "save", lambda figure, _: figures.append(figure))
    draw(report(before=decoding((9, 9, 9), sizes), after=decoding((8, 8, 8), sizes)), tmp_path / "picture.png")
    figures[0].canvas.draw()
    axis = next(axis for axis in figures[0].axes if axis.get_title() == "state for the next token")
    low, high = axis.get_ylim()
    shown = [label for label, at in zip(axis.get_yticklabels(), axis.get_yticks(), strict=True) if low <= at <= high]
    assert 1 <= len(shown) <= 12
    assert all(label.get_text() for label in shown)


def test_a_report_without_decoding_is_drawn(tmp_path):
    draw(report(width=8), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
