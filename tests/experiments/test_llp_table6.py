"""The LLP paper's tables: the printed numbers from the formulas, and the true counts entry by entry."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.harness.result import read_result
from experiments.llp_table6 import experiment
from experiments.llp_table6.command import main
from experiments.llp_table6.formulas import PRINTED
from experiments.llp_table6.paper import Setting, rows
from subquad import attention

NUMBERS = {"Full": 19327, "PAR": 4932, "V1": 14495, "V2": 9682, "V3": 14858, "LLP": 1226}


def test_the_formulas_give_every_printed_number():
    assert {row.name: row.printed_millions for row in rows(Setting()) if row.printed_millions is not None} == NUMBERS
    assert {claim.name: Setting().value(claim.table_6) // 10**6 for claim in PRINTED} == NUMBERS
    for claim in PRINTED:
        assert claim.right == (Setting().value(claim.table_6) == Setting().value(claim.dense))


def test_the_committed_result_has_these_counts():
    committed = read_result(Path(experiment.__file__).parent)["cpu"]["rows"]
    assert committed == [{"arm": "counts", "seed": 0, **row} for row in experiment.run(None)]


# The counts at another setting, from every entry of every mask of every layer and head.

SMALL = Setting(tokens=24, layers=3, heads=2, segment=6, projection=5)


def causally(q, k):
    return k <= q


def everything(q, k):
    return True


def blocks(name, layer, head):
    """Return the blocks `(queries, keys, mask)` that one head of one layer computes, by the papers' descriptions."""
    n, s, p = SMALL.tokens, SMALL.segment, SMALL.projection
    h, c = n // 2, s // 2
    history, latents, everyone = range(h), range(h, n), range(n)
    rows_p = range(-p, 0)  # the projected rows stand before the latents
    if name == "Full":
        return [(everyone, everyone, causally)]
    if name == "PAR":
        return [(latents, everyone if layer == 0 else latents, causally)]
    if name == "V1":
        return [(history, history, everything), (latents, everyone, causally)]
    if name == "V2":
        segments = [range(start, start + s) for start in range(0, h, s)]
        return [*((segment, segment, everything) for segment in segments), (latents, everyone, causally)]
    compressed = [(rows_p, rows_p, everything), (latents, [*rows_p, *latents], causally)]
    if name == "V3":
        return compressed
    if name == "V3, full first":
        return [(latents, everyone, causally)] if layer == 0 else compressed
    if name == "LLP":
        halves = [range(start, start + c) for start in range(0, n, c)]
        first = (halves[0], halves[0], causally)
        return [first, *((b, [*a, *b], causally) for a, b in pairwise(halves))]
    if name == "Window":
        return [([q], range(q - s + 1, q + 1), lambda q, k: 0 <= k <= q) for q in everyone]
    groups = [list(range(start, start + s)) for start in range(0, n, s)]
    if head % 2:  # half of the heads move their groups by c
        moved = [list(range(start, start + s)) for start in range(c, n - c, s)]
        first, last = list(range(c)), list(range(n - c, n))
        wrapped = [last + first]  # in the order of the roll, in which the mask is a triangle
        groups = [*moved, *(wrapped if name == "S2, wrapped" else [first, last])]
    return [(range(len(g)), range(len(g)), causally) for g in groups]


@pytest.mark.parametrize("row", list(rows(SMALL)), ids=lambda row: row.name)
def test_the_true_counts_are_those_of_the_masks_entry_by_entry(row):
    computed = allowed = 0
    for layer in range(SMALL.layers):
        for head in range(SMALL.heads):
            for queries, keys, sees in blocks(row.name, layer, head):
                computed += len(queries) * len(keys)
                allowed += sum(sees(q, k) for q in queries for k in keys)
    assert (row.dense, row.unmasked) == (computed, allowed)


def test_another_setting_has_no_printed_numbers_but_the_formulas_of_the_table():
    for row in rows(SMALL):
        assert (row.printed_millions, row.printed_percent) == (None, None)
    llp = next(row for row in rows(SMALL) if row.name == "LLP")
    assert llp.table_6 == (2 * 24 // 6 * 3 * 6 + 3**2) * 3 * 2
    assert llp.table_8 == ((24 // 6 - 1) * 3 * 6 + 3**2) * 3 * 2


def test_the_true_llp_count_is_that_of_the_library():
    row = next(row for row in rows(Setting()) if row.name == "LLP")
    cost = attention.build("llp", dim=48, num_heads=24, segment=256).cost(4096)
    assert (row.dense, row.unmasked) == (48 * cost.score_entries, 48 * cost.unmasked_entries)


def test_impossible_settings_are_refused():
    for wrong, message in (
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "heads must be even .*, got 3"),
        ({"segment": 7}, "segment must be even .*, got 7"),
        ({"tokens": 256}, "tokens must be a multiple of 2 x segment .*, got tokens=256, segment=256"),
    ):
        with pytest.raises(ValueError, match=message):
            Setting(**wrong)


def test_the_command_prints_the_paper_and_what_is_true(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    file, table = tmp_path / "paper.json", tmp_path / "paper.csv"
    assert main(["--json", str(file), "--csv", str(table)]) == 0
    out = capsys.readouterr().out
    for printed in ("4,932 (25%)", "14,495 (75%)", "9,682 (50%)", "14,858 (77%)", "1,226 (6%)", "19,327 (100%)"):
        assert printed in out
    assert "V3. The printed number is wrong" in out
    assert out.count("Table 8 prints") == 3
    values = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert values["LLP"]["dense"] == 1_189_085_184
    assert len(table.read_text().splitlines()) == 1 + len(values)

    assert main(["--tokens", "24", "--layers", "3", "--heads", "2", "--segment", "6", "--projection", "5"]) == 0
    out = capsys.readouterr().out
    assert "n = 24 tokens" in out
    assert "19,327" not in out

    with pytest.raises(SystemExit) as exit_info:
        main(["--tokens", "100"])
    assert exit_info.value.code == 2
    assert "tokens must be a multiple of 2 x segment" in " ".join(capsys.readouterr().err.split())
