"""Tables on terminals of 80 columns: no row is wrapped or cut, and what is left out is named."""

import re

import pytest

from subquad.adaptation.extension_report import AFTER, BEFORE, CONTROL, SCALED
from subquad.cli import convert, lora
from subquad.cli.tables import print_table

HEADERS = ["", "tokens", "first of all", "second", "third"]
LINES = [["a/long/name", "1,024", *["100.0 ±10.0"] * 3], ["", "2,048", *["9.0 ±1.0"] * 3]]


def shown(capsys, *arguments, **options):
    print_table(*arguments, **options)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_columns_are_left_out_until_rows_fit_and_named(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = shown(capsys, "title", HEADERS, LINES, spare=["third", "second"])
    assert "first of all        second         third" in whole[2]
    assert " a/long/name    1,024    100.0 ±10.0   100.0 ±10.0   100.0 ±10.0" in whole
    monkeypatch.setenv("COLUMNS", "52")
    fewer = shown(capsys, "title", HEADERS, LINES, spare=["third", "second"], elsewhere=" or by --json")
    assert " a/long/name    1,024   100.0 ±10.0   100.0 ±10.0" in fewer  # and the header of two lines
    assert " ".join(fewer).endswith("Left out: third. See them in a wider terminal or by --json.")
    assert max(map(len, fewer)) <= 52


def test_a_table_that_can_not_fit_is_folded_and_no_number_is_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = shown(capsys, "title", HEADERS, LINES)
    assert max(map(len, lines)) <= 30
    assert "…" not in "".join(lines)
    assert "".join(lines).count("0") == sum("".join(line).count("0") for line in LINES)


def test_text_alone_is_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = "word " * 20
    lines = shown(capsys, "", ("name", "about", "size"), [("a", words, "1.00 MiB")], text="about", justify="left")
    assert max(map(len, lines)) <= 60
    assert any(line.endswith("1.00 MiB") for line in lines)
    assert sum(line.count("word") for line in lines) == 20


def test_the_parts_of_a_conversions_gap_add_up_to_it():
    parts = [{"start": 0, "stop": 8, "tokens": 3, "gap": 0.2}, {"start": 8, "stop": 16, "tokens": 1, "gap": 1.4}]
    _, _, lines = convert._positions({"stages": [], "gap": {"loss": 0.5, "by_position": parts}})
    assert [line[-1] for line in lines] == ["+0.1500", "+0.3500", "+0.5000"]


LAYERS = " ".join(["0.123"] * 12)
FOLDER = "runs/stories-of-llp/adapter"


@pytest.mark.parametrize(("headers", "line", "options"), [
    (convert.STAGE_COLUMNS, ["after replacing", "3.2232", "1,234.123", "100% ± 10%", LAYERS, "1.2"],
     {"spare": convert.SPARE}),
    (lora.HEADERS, [FOLDER, FOLDER, "16", "32.0 (rslora)", "query, value", "1.23 M", "0.12%", "1.50 MiB", "yes"],
     {"spare": lora.SPARE, "text": "fits"}),
    (["position", BEFORE, SCALED, CONTROL, AFTER, "extended, full attention"],
     ["1,025 to 2,048", *["+0.0123 ± 0.0034"] * 5], {"spare": (SCALED, CONTROL, BEFORE)}),
], ids=["convert", "lora", "extend"])  # fmt: skip
def test_the_widest_tables_of_commands_fit_80_columns(capsys, monkeypatch, headers, line, options):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, "title", headers, [line], **options)
    assert max(map(len, lines)) <= 80
    assert len([row for row in lines if re.match(rf" {re.escape(line[0])}  ", row)]) == 1
    rule = next(i for i, row in enumerate(lines) if "──" in row)
    assert lines[rule + 2] == ""  # the row takes one line
    assert lines[-2].startswith("Left out: ") or lines[-1].startswith("Left out: ")
