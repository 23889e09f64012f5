"""Claims: verdicts from rows, and the noise that they are judged by."""

import math
from pathlib import Path

import pytest

from experiments.harness import noise
from experiments.harness.claims import Claim, Expected, verdicts
from experiments.harness.noise import FAILS, HOLDS, NOISE, Difference, Margin, Noise, difference, pooled, quantile


def rows(**values):
    return [{"arm": arm, "seed": i, "loss": v} for arm, found in values.items() for i, v in enumerate(found)]


def claim(kind, *pairs, **more):
    return Claim.from_dict({"id": "c", "says": "s", "theirs": "t", "kind": kind, "pairs": list(pairs), **more})


def judge(chosen, found, folder=Path("nowhere")):
    expected = Expected(paper="p", title="t", source="s", comparable="no", claims=[chosen])
    (verdict,) = verdicts(folder, expected, {"cpu": {"rows": found, "done": 1, "units": 1}})
    return verdict.verdict, verdict.ours


def pair(left, right):
    return [{"arm": left}, {"arm": right}]


AB = pair("a", "b")
CLEAR = rows(a=[1.0, 1.01, 0.99], b=[2.0, 2.01, 1.99], c=[1.005])
NOISY = rows(a=[1.0, 2.0, 3.0], b=[1.1, 2.2, 3.0])
EQUAL = rows(a=[1.0, 1.0], b=[1.0, 1.0], c=[2.0, 2.0])


def test_a_difference_counts_only_beyond_the_noise():
    for kind, pairs, found, verdict in (
        ("lower", [AB], CLEAR, HOLDS),
        ("higher", [AB], CLEAR, FAILS),
        ("lower", [AB], NOISY, NOISE),
        ("higher", [AB], NOISY, NOISE),
        # The claim is about all of its pairs.
        ("lower", [AB, pair("c", "b")], CLEAR, HOLDS),
        ("lower", [AB, pair("a", "c")], CLEAR, NOISE),
        ("lower", [AB, pair("b", "c")], CLEAR, FAILS),
        ("lower", [AB, pair("b", "d")], CLEAR, "not run"),
        ("lower", [AB], [], "not run"),
        # Equal values are no difference, however small the noise.
        ("lower", [AB], EQUAL, NOISE),
        ("lower", [pair("a", "c")], EQUAL, HOLDS),
        ("higher", [pair("a", "c")], EQUAL, FAILS),
    ):
        assert judge(claim(kind, *pairs), found)[0] == verdict, (kind, pairs)


def test_a_difference_is_shown_with_its_standard_error_which_one_seed_does_not_give():
    assert judge(claim("lower", AB), CLEAR)[1] == "1 against 2 (-1 ± 0.008165)"
    once = rows(a=[1.0], b=[2.0])
    assert judge(claim("lower", AB), once) == (NOISE, "1 against 2 (-1, one seed each)")
    assert math.isnan(pooled(once, "loss").deviation)
    assert pooled(once, "loss").freedom == 0


def test_the_noise_is_pooled_over_rows_that_differ_only_in_the_seed():
    two = [{**row, "tokens": tokens} for tokens in (1, 2) for row in rows(a=[0.0, 2.0])]
    known = Noise(math.sqrt(2.0), 2)
    assert pooled(two, "loss") == known
    assert pooled([{**row, "loss": row["loss"] + row["tokens"]} for row in two], "loss") == known
    counted = [{**row, "bytes": 10 * row["tokens"] + row["seed"]} for row in two]  # differs with the seed: no label
    assert pooled(counted, "loss") == known
    assert pooled([{**row, "share": row["tokens"] / 4} for row in two], "loss") == known
    assert difference(two[:2], two[2:], "loss", Noise(2.0, 3)) == Difference(1.0, 1.0, 0.0, 2.0, 3)
    assert difference([], two, "loss", known) is None


def test_with_one_seed_integers_identify_rows_and_floats_are_measured():
    timed = [(images, images + off) for images in (1, 2) for off in (0.0, 2.0)]
    repeats = [{"arm": "a", "seed": 0, "images": n, "seconds": s, "speed": 1 / s} for n, s in timed]
    assert pooled(repeats, "seconds") == Noise(math.sqrt(2.0), 2)


def test_arms_of_many_seeds_have_a_spread_of_their_own():
    found = rows(a=[1.0, 1.1, 1.0, 1.1], b=[2.0, 2.1, 2.0, 2.1], c=[0.0, 9.0, 0.0, 9.0])
    assert pooled(found, "loss").deviation > 2
    assert judge(claim("lower", AB), found)[0] == HOLDS
    assert difference(found[:4], found[4:8], "loss", pooled(found, "loss")).freedom == 6
    assert difference(found[:4], found[8:], "loss", pooled(found, "loss")).freedom == 3


def test_quantiles_are_those_of_tables_of_students_t():
    for freedom, value in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 8: 2.306, 30: 2.042}.items():
        assert abs(quantile(0.975, freedom) / value - 1) < 0.01
    assert quantile(0.975, 0) == math.inf


def test_few_seeds_and_many_pairs_need_a_greater_difference():
    assert noise.judge([Margin(3.0, 1.0, 3)]) == NOISE
    assert noise.judge([Margin(3.0, 1.0, 4)]) == HOLDS
    assert noise.judge([Margin(-3.0, 1.0, 4)]) == FAILS
    # One of ten pairs is reversed by chance more often than a single one.
    assert noise.judge([Margin(-3.0, 1.0, 4), *[Margin(9.0, 1.0, 4)] * 9]) == NOISE
    assert noise.judge([Margin(math.nan, 1.0, 4)]) == FAILS
    assert noise.judge([Margin(1.0, math.nan, 0)]) == NOISE
    assert noise.judge([]) == NOISE


def test_the_largest_complete_scale_with_rows_decides():
    expected = Expected(paper="p", title="t", source="s", comparable="no", claims=[claim("lower", AB)])

    def told(**scales):
        given = {name: {"rows": found, "done": done, "units": 2} for name, (found, done) in scales.items()}
        (verdict,) = verdicts(Path("nowhere"), expected, given)
        return verdict.verdict, verdict.scale

    other = rows(a=[2.0, 2.01], b=[1.0, 1.01])
    assert told(cpu=(CLEAR, 2)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 2)) == (FAILS, "gpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 1)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(rows(a=[1.0]), 2)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 1)) == (HOLDS, "cpu")
    assert told(smoke=(CLEAR, 2)) == ("not run", "")


def test_equal_is_about_every_row():
    chosen = claim("equal", [{"arm": "a"}], metric="n", value=3)
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "b", "n": 4}]) == (HOLDS, "3")
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "a", "n": 40000}]) == (FAILS, "3, 40,000")
    assert judge(chosen, [{"arm": "b", "n": 3}])[0] == "not run"


def test_claims_that_are_not_measured_give_their_reason():
    assert judge(claim("not comparable", why="words"), CLEAR) == ("not comparable", "words")
    assert judge(claim("waiting", why="a week"), []) == ("waiting for a GPU", "a week")


def test_the_experiments_own_judge(tmp_path):
    code = tmp_path / "experiment.py"
    code.write_text("def claim_c(rows):\n    return ('holds', str(len(rows))) if rows[0]['seed'] == 0 else None\n")
    assert judge(claim("function"), CLEAR, tmp_path) == (HOLDS, "7")
    assert judge(claim("function"), CLEAR[1:], tmp_path)[0] == "not run"
    for text, message in (
        ("def claim_c(rows):\n    return 'perhaps', ''\n", "claim_c returned 'perhaps'; valid: holds, "),
        ("", r"has no function claim_c\(rows\)"),
    ):
        code.write_text(text)
        with pytest.raises(ValueError, match=message):
            judge(claim("function"), CLEAR, tmp_path)


def test_errors_in_a_claim():
    for values, message in (
        ({"kind": "lower"}, "of kind 'lower' needs pairs of 2"),
        ({"kind": "equal", "pairs": [[{}, {}]]}, "of kind 'equal' needs pairs of 1"),
        ({"kind": "equal", "pairs": [[{}]]}, "of kind 'equal' needs a value"),
        ({"kind": "not comparable"}, "of kind 'not comparable' needs a reason in why"),
        ({"kind": "wrong"}, "must be one of its choices"),
    ):
        with pytest.raises(ValueError, match=message):
            Claim.from_dict({"id": "c", "says": "s", "theirs": "t", **values})
