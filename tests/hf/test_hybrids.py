"""The table in docs/hybrids.md is what `tests/hf/hybrids.py` finds, and subquad keeps every law."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.hf import hybrids

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "hybrids.md").read_text(encoding="utf-8")

NAMES = re.findall(r"^\| (.+?) \| subquad \|", TEXT, re.MULTILINE)


def line(cells):
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", NAMES)
def test_subquad_keeps_every_law_and_the_page_shows_what_transformers_does(name):
    theirs, ours = hybrids.rows([name])
    assert set(ours[2:]) == {"same"}
    if f"transformers {transformers.__version__}" in TEXT:
        assert {line(theirs), line(ours)} < set(TEXT.splitlines()), "run docs/make_hybrids.py"


def test_the_page_has_every_model_and_every_law():
    assert list(hybrids.MODELS) == NAMES
    assert line(["model", "code", *hybrids.LAWS]) in TEXT.splitlines()


@pytest.mark.parametrize(
    ("found", "verdict"), [(1.00001, "same"), (1.27, "30 % off"), (0.5, "50 % off"), (3, "200 % off")]
)
def test_a_verdict_is_the_largest_share_of_the_largest_logit(found, verdict):
    expected = torch.tensor([0.5, -1.0])
    assert hybrids.verdict(lambda model: (expected * torch.tensor([1.0, found]), expected), None) == verdict


def test_an_error_and_logits_that_are_not_finite_are_no_agreement():
    assert hybrids.verdict(lambda model: model.nothing, None) == "AttributeError"
    assert hybrids.verdict(lambda model: (torch.tensor([torch.nan]), torch.ones(1)), None) == "nan % off"
