"""The reports in docs/transformers.md are those that `docs/make_transformers.py` makes."""

import importlib
import re
from pathlib import Path

import pytest
from transformers import AttentionInterface

from tests.hf import published

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
ROUNDING = re.compile(r"(?<=pass) +(0|\d\.\de-1\d)(?= )|rounding band \S+")
"""By how much a pass differs, and the band that was measured: another machine rounds otherwise."""


@pytest.fixture(scope="module")
def reports():
    yield published.reports()
    del AttentionInterface._global_mapping[published.PUBLISHED]


def test_the_published_form_leaks_and_ours_does_not(reports):
    theirs, ours = reports["published_shift"], reports["subquad_shifted"]
    assert [check.name for check in theirs.violations] == ["causality"]
    place = theirs.check("causality").where
    assert place["output"] < place["token"]
    assert ours.passed
    assert ours.check("causality").worst == 0


def test_the_page_shows_these_reports(reports, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make = importlib.import_module("make_transformers")
    blocks = make.blocks(reports)
    written = make.pages.rewritten(TEXT, blocks)
    assert ROUNDING.sub("", written) == ROUNDING.sub("", TEXT), "write them again: python docs/make_transformers.py"
    assert re.findall(r"<!-- ([a-z-]+) -->", TEXT) == list(blocks)


def test_the_page_s_table_has_every_implementation_and_its_options():
    from subquad.hf.pattern_attention import OPTIONS

    rows = dict(re.findall(r"^\| `subquad_(\w+)` \| (.*?) \|", TEXT, re.MULTILINE))
    assert {name: tuple(re.findall(r"`(\w+)`", options)) for name, options in rows.items()} == OPTIONS
