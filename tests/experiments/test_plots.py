"""Panels: axes in plain words."""

import pytest
from matplotlib.figure import Figure

from experiments.harness.plots import draw_panel, measured
from experiments.harness.recipe import Panel


@pytest.mark.parametrize("row", [{"arm": "a"}, {"arm": "a", "loss": None, "kind": 1}, {"arm": "a", "loss": 2.0}])
def test_a_panel_whose_columns_no_row_has_says_so(row):
    axis = Figure().subplots()
    draw_panel(axis, Panel(x="arm", y="loss", by="kind"), [row], (1,))
    assert [text.get_text() for text in axis.texts] == ["not measured"]
    assert not axis.lines
    draw_panel(axis, Panel(x="arm", y="loss", by="kind"), [{"arm": "a", "loss": 2.0, "kind": 1}], (1,))
    assert axis.lines


def test_panels_of_other_scales_are_left_out():
    panels = [Panel(x="arm", y="loss", where={"corpus": corpus}) for corpus in ("books", "wiki")]
    assert measured(panels, [{"arm": "a", "loss": 2.0, "corpus": "wiki"}]) == panels[1:]
    assert measured(panels, [{"arm": "a", "loss": 2.0}]) == panels


@pytest.mark.parametrize(
    ("panel", "labels"),
    [
        (Panel(x="tokens_read", y="word_perplexity"), ("tokens read", "perplexity per word")),
        (Panel(x="arm", y="bits_per_byte"), ("", "held-out bits per byte")),
        (Panel(x="tokens_read", y="word_perplexity", xlabel="T", ylabel="PPL"), ("T", "PPL")),
    ],
)
def test_an_axis_has_the_label_of_its_panel_or_its_column_in_plain_words(panel, labels):
    axis = Figure().subplots()
    draw_panel(axis, panel, [{"arm": "a", "tokens_read": 2, "word_perplexity": 3.0, "bits_per_byte": 1.0}])
    assert (axis.get_xlabel(), axis.get_ylabel()) == labels
