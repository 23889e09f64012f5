"""`subquad list`: mechanisms, options, recipes and laws."""

import re
import textwrap
from itertools import pairwise

import pytest

from subquad import attention
from subquad.attention.laws import Law
from subquad.cli.listing import CELL, markdown
from subquad.cli.parser import in_yaml
from subquad.cli.rich_table import WIDTH
from subquad.models.stacks import STACKS
from subquad.options import options
from subquad.program import command
from subquad.recipes import recipes

NAMES = [*attention.names(), *STACKS]


@pytest.mark.parametrize("columns", [70, 80])
@pytest.mark.parametrize("arguments", [[], ["perceiver_ar"], ["full"], ["--recipes"], ["--laws"]], ids=str)
def test_lists_keep_to_the_columns_that_are_asked_for(printed, monkeypatch, arguments, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    *lines, last = printed("list", *arguments).splitlines()
    assert max(map(len, lines)) <= columns
    copied = command("train") in last  # a command to copy stays on one line
    assert copied or len(last) <= columns


def test_at_80_columns_a_mechanism_takes_three_lines_at_most_and_the_rest_is_named(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed("list")
    table = out[out.index("bigbird") : out.index("Left out")].splitlines()
    starts = [i for i, line in enumerate(table) if line.split()[:1] and line.split()[0] in NAMES]
    assert len(starts) == len(NAMES)
    assert max(b - a for a, b in pairwise([*starts, len(table) - 1])) <= 3
    assert "\nLeft out: paper; form; cost in T. See them in a wider terminal or by --markdown.\n" in out
    assert re.search(r"^ gla +causal +all +$", printed("list", "--laws"), re.MULTILINE)


def test_types_and_values_are_those_of_yaml(printed):
    out = printed("list", "full") + printed("list", "perceiver_ar")
    assert not re.search("None|Literal|subquad.layers", out)
    assert re.search(r" refill +int \| null +null ", out)
    assert "cross | self |" in out


def test_every_option_is_listed_with_type_default_and_help(printed):
    configs = {name: STACKS[name].options if name in STACKS else attention.mechanism(name).Config for name in NAMES}
    for name, config in configs.items():
        assert all(text for *_, text in options(config)), name
    for name in ("llp", "latte", "perceiver_ar"):
        out = printed("list", name)
        assert max(map(len, out.splitlines()[:-1])) <= WIDTH
        for option, kind, default, text in options(configs[name]):
            first = textwrap.wrap(in_yaml(kind), CELL)[0]
            assert re.search(rf"^ {option} +{re.escape(first)} +{in_yaml(default)} ", out, re.MULTILINE)
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
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "latte causal all" in rows
    assert "latte bidirectional all but split, token by token, state size, no future, rollback, in place, ranks" in rows
    but = "split, token by token, state size, block sizes, padding, no future, documents, rollback, in place, ranks"
    assert f"shifted wrap=True all but {but}" in rows
    for text in (
        "split, token by token, state size, no future, rollback, in place, ranks: wrap=True leaks the last tokens",
        "bidirectional, documents: bidirectional: each sequence hands on a memory of its own",
        "bidirectional, no future: bidirectional: a token sees later ones",
        "stacks, weights: a stack of layers",
        "perceiver_ar, ranks: the latents are all in the last part",
        *(law.asks for law in Law),
        *(f" {name} " for name in NAMES),
    ):
        assert text in out
