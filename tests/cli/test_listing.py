"""`subquad list`: mechanisms, options, recipes and laws."""

import re

import pytest

from subquad import attention
from subquad.attention.base import LAWS
from subquad.cli.listing import WIDTH, markdown
from subquad.models.stacks import STACKS
from subquad.options import options
from subquad.recipes import recipes

NAMES = [*attention.names(), *STACKS]


@pytest.mark.parametrize("arguments", [["perceiver_ar"], ["--recipes"]], ids=str)
def test_lists_keep_to_the_columns_that_are_asked_for(printed, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, printed("list", *arguments).splitlines())) <= 70


def test_every_option_is_listed_with_type_default_and_help(printed):
    configs = {name: STACKS[name].options if name in STACKS else attention.mechanism(name).Config for name in NAMES}
    for name, config in configs.items():
        assert all(text for *_, text in options(config)), name
    for name in ("llp", "elita", "perceiver_ar"):
        out = printed("list", name)
        assert max(map(len, out.splitlines())) <= WIDTH
        for option, kind, default, text in options(configs[name]):
            assert re.search(rf"^ {option} +{re.escape(kind)} +{re.escape(default)} ", out, re.MULTILINE)
            assert text[:20] in out
        assert name not in STACKS or STACKS[name].paper in out


def test_the_list_has_mechanisms_with_papers_and_recipes(printed):
    out, only = printed("list"), printed("list", "--recipes")
    assert all(f" {attention.mechanism(name).paper} " in out for name in attention.names())
    assert all(name in out and name in only for name in recipes())
    assert "arXiv" not in only
    assert printed("list", "--markdown") == markdown() + "\n"


def test_the_laws_are_a_row_a_form_with_the_reasons_below(printed):
    out = printed("list", "--laws")
    cells = [line.split() for line in out.splitlines()]
    assert ["latte", "causal", *["yes"] * 15] in cells
    assert ["latte", "bidirectional", "yes", "yes", "-", "-", "-", "yes", "yes", "yes", "-", *["yes"] * 6] in cells
    assert ["shifted", "wrap=True", "yes", "yes", "-", "-", "-", "yes", "-", "-", "-", *["yes"] * 5, "-"] in cells
    for text in (
        "laws 3, 4, 5, 9: wrap=True leaks the last tokens",
        "bidirectional, law 15: bidirectional: each sequence hands on a memory of its own",
        "bidirectional, law 9: bidirectional: a token sees later ones",
        "stacks, law 1: a stack of layers",
        *LAWS.values(),
        *(f" {name} " for name in NAMES),
    ):
        assert text in out
