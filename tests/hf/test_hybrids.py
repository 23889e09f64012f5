"""The table in docs/hybrids.md is what `docs/make_hybrids.py` finds, and subquad keeps every law."""

import importlib
from pathlib import Path

import pytest
import torch
import transformers

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "hybrids.md").read_text(encoding="utf-8")


@pytest.fixture
def make(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_hybrids")


def test_subquad_keeps_every_law_and_the_page_shows_what_transformers_does(make):
    rows = list(make.rows())
    assert [row[0] for row in rows[::2]] == [row[0] for row in rows[1::2]] == list(make.MODELS)
    for name, code, *verdicts in rows[1::2]:
        assert (code, set(verdicts)) == ("subquad", {"same"}), name
    if f"transformers {transformers.__version__}" in TEXT:
        assert make.pages.rewritten(TEXT, {"laws": lambda: make.table(rows)}) == TEXT, "run docs/make_hybrids.py"


@pytest.mark.parametrize(
    ("found", "verdict"), [(1.00001, "same"), (1.27, "30 % off"), (0.5, "50 % off"), (3, "200 % off")]
)
def test_a_verdict_is_the_largest_share_of_the_largest_logit(make, found, verdict):
    expected = torch.tensor([0.5, -1.0])
    assert make.verdict(lambda model: (expected * torch.tensor([1.0, found]), expected), None) == verdict


def test_an_error_and_logits_that_are_not_finite_are_no_agreement(make):
    assert make.verdict(lambda model: model.nothing, None) == "AttributeError"
    assert make.verdict(lambda model: (torch.tensor([torch.nan]), torch.ones(1)), None) == "nan % off"
