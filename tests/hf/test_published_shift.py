"""The reports in docs/transformers.md are those that `docs/make_transformers.py` makes."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AttentionInterface

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
ROUNDING = re.compile(r"(?<=pass) +(0|\d\.\de-1\d)(?= )|rounding band \S+")
"""By how much a pass differs, and the band that was measured: another machine rounds otherwise."""


@pytest.fixture(scope="module")
def make():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_transformers.py")))


@pytest.fixture(scope="module")
def reports(make):
    yield make.reports()
    del AttentionInterface._global_mapping[make.PUBLISHED]


def test_the_published_form_leaks_and_ours_does_not(reports):
    published, ours = reports["published_shift"], reports["subquad_shifted"]
    assert [check.name for check in published.violations] == ["causality"]
    place = published.check("causality").where
    assert place["output"] < place["token"]
    assert ours.passed
    assert ours.check("causality").worst == 0


def test_the_page_shows_these_reports(make, reports):
    written = make.page_with(reports, TEXT)
    assert ROUNDING.sub("", written) == ROUNDING.sub("", TEXT), "write them again: python docs/make_transformers.py"


def test_a_page_without_the_block_is_refused(make, reports):
    with pytest.raises(ValueError, match="the page has no block for published_shift"):
        make.page_with(reports, "nothing")


def test_the_page_s_table_has_every_implementation_and_its_options():
    from subquad.hf.pattern_attention import OPTIONS

    rows = dict(re.findall(r"^\| `subquad_(\w+)` \| (.*?) \|", TEXT, re.MULTILINE))
    assert {name: tuple(re.findall(r"`(\w+)`", options)) for name, options in rows.items()} == OPTIONS
