"""Claims: what rows say of them, and that noise is not taken for a result."""

import math
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.claims import Claim, Expected, read_expected, verdicts
from experiments.harness.noise import (
    Margin,
    Noise,
    difference,
    number,
    pooled,
    quantile,
    select,
)
from experiments.harness.noise import (
    judge as judge_margins,
)

Row = dict[str, Any]


def rows(**values: list[float]) -> list[Row]:
    return [{"arm": arm, "seed": i, "loss": v} for arm, found in values.items() for i, v in enumerate(found)]


def claim(kind: str, *pairs: list[Row], **more: Any) -> Claim:
    return Claim.from_dict({"id": "c", "says": "s", "theirs": "t", "kind": kind, "pairs": list(pairs), **more})


def judge(chosen: Claim, found: list[Row], folder: Path = Path("nowhere")) -> tuple[str, str]:
    expected = Expected(paper="p", title="t", source="s", comparable="no", claims=[chosen])
    (verdict,) = verdicts(folder, expected, {"cpu": {"rows": found, "done": 1, "units": 1}})
    return verdict.verdict, verdict.ours


AB = [{"arm": "a"}, {"arm": "b"}]
CLEAR = rows(a=[1.0, 1.01, 0.99], b=[2.0, 2.01, 1.99])
NOISY = rows(a=[1.0, 2.0, 3.0], b=[1.1, 2.2, 3.0])


def test_a_difference_beyond_the_noise_holds_or_does_not() -> None:
    assert judge(claim("lower", AB), CLEAR)[0] == "holds"
    assert judge(claim("higher", AB), CLEAR)[0] == "does not hold"
    assert judge(claim("lower", AB), NOISY)[0] == "no difference beyond the noise"
    assert judge(claim("higher", AB), NOISY)[0] == "no difference beyond the noise"
    assert judge(claim("lower", AB), CLEAR)[1] == "1 against 2 (-1 ± 0.008165)"


def test_a_claim_about_several_pairs_is_about_all_of_them() -> None:
    found = [*CLEAR, {"arm": "c", "seed": 0, "loss": 1.005}]
    assert judge(claim("lower", AB, [{"arm": "c"}, {"arm": "b"}]), found)[0] == "holds"
    assert judge(claim("lower", AB, [{"arm": "a"}, {"arm": "c"}]), found)[0] == "no difference beyond the noise"
    assert judge(claim("lower", AB, [{"arm": "b"}, {"arm": "c"}]), found)[0] == "does not hold"
    assert judge(claim("lower", AB, [{"arm": "b"}, {"arm": "d"}]), found)[0] == "not run"


def test_where_no_arm_ran_twice_the_noise_is_not_known() -> None:
    verdict, ours = judge(claim("lower", AB), rows(a=[1.0], b=[2.0]))
    assert verdict == "no difference beyond the noise"
    assert "one seed each" in ours
    noise = pooled(rows(a=[1.0], b=[2.0]), "loss")
    assert math.isnan(noise.deviation)
    assert noise.freedom == 0


def test_equal_values_are_no_difference() -> None:
    found = rows(a=[1.0, 1.0], b=[1.0, 1.0], c=[2.0, 2.0])
    assert judge(claim("lower", AB), found)[0] == "no difference beyond the noise"
    assert judge(claim("lower", [{"arm": "a"}, {"arm": "c"}]), found)[0] == "holds"
    assert judge(claim("higher", [{"arm": "a"}, {"arm": "c"}]), found)[0] == "does not hold"


def test_the_noise_is_pooled_over_rows_that_differ_in_the_seed_alone() -> None:
    two = [{**row, "tokens": tokens} for tokens in (1, 2) for row in rows(a=[0.0, 2.0])]
    noise = Noise(math.sqrt(2.0), 2)
    assert pooled(two, "loss") == noise
    assert pooled([{**row, "loss": row["loss"] + row["tokens"]} for row in two], "loss") == noise
    counted = [{**row, "bytes": 10 * row["tokens"] + row["seed"]} for row in two]  # differs with the seed: no label
    assert pooled(counted, "loss") == noise
    assert pooled([{**row, "share": row["tokens"] / 4} for row in two], "loss") == noise
    found = difference(two[:2], two[2:], "loss", Noise(2.0, 3))
    assert found is not None
    assert (found.value, found.error, found.freedom) == (0.0, 2.0, 3)
    assert difference([], two, "loss", noise) is None


def test_of_one_seed_whole_numbers_tell_rows_apart_and_the_others_are_repeats() -> None:
    repeats = [
        {"arm": "a", "seed": 0, "images": images, "seconds": images + off, "speed": 1.0 / (images + off)}
        for images in (1, 2)
        for off in (0.0, 2.0)
    ]
    assert pooled(repeats, "seconds") == Noise(math.sqrt(2.0), 2)


def test_arms_of_many_seeds_have_a_spread_of_their_own() -> None:
    found = rows(a=[1.0, 1.1, 1.0, 1.1], b=[2.0, 2.1, 2.0, 2.1], c=[0.0, 9.0, 0.0, 9.0])
    assert pooled(found, "loss").deviation > 2
    assert judge(claim("lower", AB), found)[0] == "holds"
    one = difference(found[:4], found[4:8], "loss", pooled(found, "loss"))
    assert one is not None
    assert one.freedom == 6
    other = difference(found[:4], found[8:], "loss", pooled(found, "loss"))
    assert other is not None
    assert other.freedom == 3


def test_few_seeds_need_a_greater_difference() -> None:
    assert quantile(0.975, 0) == math.inf
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 8: 2.306, 30: 2.042}  # from tables of Student's t
    for freedom, value in known.items():
        assert abs(quantile(0.975, freedom) / value - 1) < 0.01
    three = Margin(3.0, 1.0, 3)
    assert judge_margins([three]) == "no difference beyond the noise"
    assert judge_margins([Margin(3.0, 1.0, 4)]) == "holds"
    assert judge_margins([Margin(-3.0, 1.0, 4)]) == "does not hold"
    # Of ten pairs one is the other way by chance sooner than of one.
    assert judge_margins([Margin(-3.0, 1.0, 4), *[Margin(9.0, 1.0, 4)] * 9]) == "no difference beyond the noise"
    assert judge_margins([Margin(math.nan, 1.0, 4)]) == "does not hold"
    assert judge_margins([Margin(1.0, math.nan, 0)]) == "no difference beyond the noise"
    assert judge_margins([]) == "no difference beyond the noise"


def test_the_largest_whole_scale_that_says_anything_is_told() -> None:
    chosen = claim("lower", AB)
    expected = Expected(paper="p", title="t", source="s", comparable="no", claims=[chosen])

    def told(**scales: tuple[list[Row], int]) -> tuple[str, str]:
        given = {name: {"rows": found, "done": done, "units": 2} for name, (found, done) in scales.items()}
        (verdict,) = verdicts(Path("nowhere"), expected, given)
        return verdict.verdict, verdict.scale

    other = rows(a=[2.0, 2.01], b=[1.0, 1.01])
    assert told(cpu=(CLEAR, 2)) == ("holds", "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 2)) == ("does not hold", "gpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 1)) == ("holds", "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(rows(a=[1.0]), 2)) == ("holds", "cpu")
    assert told(cpu=(CLEAR, 1)) == ("holds", "cpu")
    assert told(smoke=(CLEAR, 2)) == ("not run", "")


def test_equal_is_about_every_row() -> None:
    chosen = claim("equal", [{"arm": "a"}], metric="n", value=3)
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "b", "n": 4}]) == ("holds", "3")
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "a", "n": 40000}]) == ("does not hold", "3, 40,000")
    assert judge(chosen, [{"arm": "b", "n": 3}])[0] == "not run"


def test_reasons_stand_for_what_is_not_measured() -> None:
    assert judge(claim("not comparable", why="words"), CLEAR) == ("not comparable", "words")
    assert judge(claim("waiting", why="a week"), []) == ("waiting for a GPU", "a week")
    assert judge(claim("lower", AB), [])[0] == "not run"


def test_the_experiments_own_judge(tmp_path: Path) -> None:
    code = tmp_path / "experiment.py"
    code.write_text("def claim_c(rows):\n    return ('holds', str(len(rows))) if rows[0]['seed'] == 0 else None\n")
    assert judge(claim("function"), CLEAR, tmp_path) == ("holds", "6")
    assert judge(claim("function"), CLEAR[1:], tmp_path)[0] == "not run"
    code.write_text("def claim_c(rows):\n    return 'perhaps', ''\n")
    with pytest.raises(ValueError, match=r"claim_c returned 'perhaps'; valid: holds, "):
        judge(claim("function"), CLEAR, tmp_path)
    code.write_text("")
    with pytest.raises(ValueError, match=r"has no function claim_c\(rows\)"):
        judge(claim("function"), CLEAR, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "lower"}, "of kind 'lower' needs pairs of 2"),
        ({"kind": "equal", "pairs": [[{}, {}]]}, "of kind 'equal' needs pairs of 1"),
        ({"kind": "equal", "pairs": [[{}]]}, "of kind 'equal' needs a value"),
        ({"kind": "not comparable"}, "of kind 'not comparable' needs a reason in why"),
        ({"kind": "wrong"}, "must be one of its choices"),
    ],
)
def test_a_wrong_claim_says_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Claim.from_dict({"id": "c", "says": "s", "theirs": "t", **values})


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "expected.json").write_text('{"paper": "p"}')
    with pytest.raises(ValueError, match=r"expected\.json: Expected needs the key 'title'"):
        read_expected(tmp_path)


def test_rows_are_chosen_by_labels() -> None:
    assert len(select(CLEAR, {"arm": "a"})) == 3
    assert len(select(CLEAR, {"arm": ["a", "b"], "seed": 1})) == 2
    assert select(CLEAR, {"kind": "x"}) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (12, "12"),
        (12.0, "12"),
        (1.23456, "1.235"),
        (123.456, "123.5"),
        (12345.6, "12,346"),
        (1.5e9, "1.5e+09"),
    ],
)
def test_numbers_have_the_digits_that_a_reader_needs(value: float, shown: str) -> None:
    assert number(value) == shown
