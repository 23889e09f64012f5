"""The LLP paper's tables: the printed numbers from the formulas, and the true counts by counting literally."""

import json
import re
from itertools import pairwise

import pytest

from experiments.llp_table6.command import main
from experiments.llp_table6.formulas import COMPARISONS, PRINTED
from experiments.llp_table6.paper import HEADERS, Setting, cells, notes, rows

NUMBERS = {"Full": 19327, "PAR": 4932, "V1": 14495, "V2": 9682, "V3": 14858, "LLP": 1226}


def test_the_formulas_give_every_printed_number():
    assert {row.name: row.printed_millions for row in rows(Setting()) if row.printed_millions is not None} == NUMBERS
    assert {claim.name: Setting().value(claim.table_6) // 10**6 for claim in PRINTED} == NUMBERS


def test_the_true_counts_at_the_papers_setting():
    counts = {row.name: (row.dense, row.unmasked) for row in rows(Setting())}
    assert counts == {
        "Full": (19_327_352_832, 9_666_035_712),
        "PAR": (4_932_501_504, 2_517_762_048),
        "V1": (14_495_514_624, 12_080_775_168),
        "V2": (10_267_656_192, 7_852_916_736),
        "V3": (5_511_315_456, 3_096_576_000),
        "LLP": (1_189_085_184, 889_454_592),
        "V3, full first": (5_597_822_976, 3_183_083_520),
        "S2": (1_189_085_184, 596_901_888),
        "S2, wrapped": (1_207_959_552, 606_339_072),
        "Window": (1_207_959_552, 1_170_358_272),
    }
    percents = {row.name: (f"{row.dense_percent:.2f}", f"{row.unmasked_percent:.2f}") for row in rows(Setting())}
    assert percents["V1"] == ("75.00", "124.98")
    assert percents["V3"] == ("28.52", "32.04")
    assert percents["LLP"] == ("6.15", "9.20")


def test_the_printed_formulas_give_other_numbers_for_three_rows():
    by_formula = {claim.name: Setting().value(claim.table_8) // 10**6 for claim in PRINTED}
    assert {name for name in NUMBERS if by_formula[name] != NUMBERS[name]} == {"V2", "V3", "LLP"}
    assert (by_formula["V2"], by_formula["V3"], by_formula["LLP"]) == (9739, 5597, 585)
    for claim in PRINTED:
        assert claim.right == (Setting().value(claim.table_6) == Setting().value(claim.dense))


# --- by counting: every entry of every mask of every layer and head, at another setting

SMALL = Setting(tokens=24, layers=3, heads=2, segment=6, projection=5)


def count(queries, keys, sees):
    """Entries of a block that is computed, and how many of them the mask leaves."""
    allowed = sum(1 for q in queries for k in keys if sees(q, k))
    return len(queries) * len(keys), allowed


def causally(q, k):
    return k <= q


def everything(q, k):
    return True


def blocks(name, layer, head):
    """The blocks `(queries, keys, mask)` that one head of one layer computes, from the papers' descriptions."""
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
            for block in blocks(row.name, layer, head):
                more = count(*block)
                computed, allowed = computed + more[0], allowed + more[1]
    assert (row.dense, row.unmasked) == (computed, allowed)


def test_another_setting_has_no_printed_numbers_but_the_formulas_of_the_table():
    for row in rows(SMALL):
        assert (row.printed_millions, row.printed_percent) == (None, None)
    llp = next(row for row in rows(SMALL) if row.name == "LLP")
    assert llp.table_6 == (2 * 24 // 6 * 3 * 6 + 3**2) * 3 * 2
    assert llp.table_8 == ((24 // 6 - 1) * 3 * 6 + 3**2) * 3 * 2


def test_the_true_llp_count_is_that_of_the_library():
    from subquad import attention

    layer = attention.build("llp", dim=48, num_heads=24, segment=256)
    row = next(row for row in rows(Setting()) if row.name == "LLP")
    cost = layer.cost(4096)
    assert row.dense == 48 * cost.score_entries
    assert row.unmasked == 48 * cost.unmasked_entries


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "heads must be even .*, got 3"),
        ({"segment": 7}, "segment must be even .*, got 7"),
        ({"tokens": 256}, "tokens must be a multiple of 2 x segment .*, got tokens=256, segment=256"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


def test_cells_stand_under_their_headers_and_notes_name_what_differs():
    for row in rows(Setting()):
        assert len(cells(row)) == len(HEADERS)
        lines = list(notes(row))
        assert lines[0] == row.note
        assert any("Table 8 prints" in line for line in lines) == (row.right is False)
    v3 = next(row for row in rows(Setting()) if row.name == "V3")
    assert cells(v3)[1:6] == ("14,858 (77%)", "5,597.82", "14,858.85", "5,511.32", "28.52%")


def test_every_formula_uses_only_the_names_of_the_setting():
    formulas = [f for claim in PRINTED for f in (claim.table_8, claim.table_6, claim.dense, claim.unmasked)]
    formulas += [f for comparison in COMPARISONS for f in (comparison.dense, comparison.unmasked)]
    assert {name for formula in formulas for name in re.findall(r"[A-Za-z]+", formula)} <= set("nlHsp")


# --- the command


@pytest.fixture
def _no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.usefixtures("_no_width")
def test_the_paper_is_printed_with_what_is_true(capsys, tmp_path):
    file, table = tmp_path / "paper.json", tmp_path / "paper.csv"
    assert main(["--json", str(file), "--csv", str(table)]) == 0
    out = capsys.readouterr().out
    for printed in ("4,932 (25%)", "14,495 (75%)", "9,682 (50%)", "14,858 (77%)", "1,226 (6%)", "19,327 (100%)"):
        assert printed in out
    assert "V3. The printed number is wrong" in out
    values = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert values["LLP"]["dense"] == 1_189_085_184
    assert len(table.read_text().splitlines()) == 1 + len(values)


@pytest.mark.usefixtures("_no_width")
def test_the_paper_at_another_setting(capsys):
    sizes = ["--tokens", "24", "--layers", "3", "--heads", "2", "--segment", "6", "--projection", "5"]
    assert main(sizes) == 0
    out = capsys.readouterr().out
    assert "n = 24 tokens" in out
    assert "19,327" not in out


def test_impossible_sizes_of_the_command_are_named(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--tokens", "100"])
    assert exit_info.value.code == 2
    assert "tokens must be a multiple of 2 x segment" in " ".join(capsys.readouterr().err.split())
