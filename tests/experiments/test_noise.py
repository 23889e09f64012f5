"""The verdict arithmetic, with figures worked out by hand (and by scipy 1.16, where a comment says so)."""

import itertools
import math
import statistics

import pytest

from experiments.harness import noise
from experiments.harness.noise import (
    EXACT,
    FAILS,
    HOLDS,
    INDICATION,
    SAME,
    UNRESOLVED,
    Difference,
    Noise,
    compare,
    difference,
    gain,
    pooled,
    quantile,
)
from tests.experiments.helpers import rows

LEFT = [
    {"arm": "a", "seed": 0, "text": "t", "loss": 2.0, "unigram": 4.0, "loss_blocks": [0.0, 2.0, 2.0, 4.0]},
    {"arm": "a", "seed": 1, "text": "t", "loss": 3.0, "unigram": 4.0, "loss_blocks": [2.0, 2.0, 4.0, 4.0]},
]
RIGHT = [
    {"arm": "b", "seed": 0, "text": "t", "loss": 1.4, "unigram": 4.0, "loss_blocks": [1.0, 0.0, 3.0, 2.0]},
    {"arm": "b", "seed": 1, "text": "t", "loss": 2.1, "unigram": 4.0, "loss_blocks": [1.0, 2.0, 3.0, 2.0]},
]
A, B = {"arm": "a"}, {"arm": "b"}


def test_the_spread_is_pooled_over_arms():
    """Variances 4e-4 and 2.25e-4, pooled 3.125e-4: the error of a difference of two times three is sqrt(that 2 / 3)."""
    found = compare(rows(a=[1.0, 1.02, 0.98], b=[2.0, 2.015, 1.985]), A, B, "loss")
    assert (found.value, found.freedom, found.seeds) == (pytest.approx(-1.0), 4, 3)
    assert found.error == pytest.approx(0.0144337567)
    assert found.interval()[0] == pytest.approx(-1.0400748, rel=1e-3)  # t(0.975, 4) = 2.7764451
    assert not found.complete


def test_the_noise_is_pooled_over_rows_that_differ_only_in_the_seed():
    two = [{**row, "tokens": tokens} for tokens in (1, 2) for row in rows(a=[0.0, 2.0])]

    def spread(some):
        found = pooled(some, "loss")
        return found.deviation, found.freedom

    assert spread(two) == (math.sqrt(2.0), 2)
    assert spread([{**row, "loss": row["loss"] + row["tokens"]} for row in two]) == (math.sqrt(2.0), 2)
    counted = [{**row, "bytes": 10 * row["tokens"] + row["seed"]} for row in two]  # differs with the seed: no label
    assert spread(counted) == (math.sqrt(2.0), 2)
    said = [{**row, "plateau": "yes" if row["seed"] else "none"} for row in two]  # so can a text
    assert spread(said) == (math.sqrt(2.0), 2)
    assert spread([{**row, "share": row["tokens"] / 4, "loss_blocks": [row["loss"]]} for row in two])[1] == 2
    assert difference(two[:2], two[2:], "loss", Noise(2.0, 3)).error == 2.0
    assert difference([], two, "loss", Noise(2.0, 3)) is None
    assert math.isnan(pooled(rows(a=[1.0], b=[2.0]), "loss").deviation)


def test_a_loss_that_is_not_finite_has_no_part_in_the_noise():
    rows = [{"arm": arm, "seed": seed, "loss": loss} for arm, *losses in (("a", 1.0, 2.0), ("b", 1.0, 2.0))
            for seed, loss in enumerate(losses)]  # fmt: skip
    diverged = [*rows, {"arm": "b", "seed": 2, "loss": -math.inf}, {"arm": "a", "seed": 2, "loss": math.nan}]
    assert pooled(diverged, "loss") == pooled(rows, "loss")


def test_with_one_seed_integers_identify_rows_and_floats_are_measured():
    timed = [(images, images + off) for images in (1, 2) for off in (0.0, 2.0)]
    repeats = [{"arm": "a", "seed": 0, "images": n, "seconds": s, "speed": 1 / s} for n, s in timed]
    assert pooled(repeats, "seconds").deviation == math.sqrt(2.0)


def test_texts_are_not_pooled():
    loud = [{**row, "text": "other"} for row in rows(a=[0.0, 9.0], b=[0.0, 9.0])]
    quiet = [{**row, "text": "t"} for row in rows(a=[1.0, 1.1], b=[2.0, 2.1])]
    assert compare([*loud, *quiet], {**A, "text": "t"}, {**B, "text": "t"}, "loss").error == pytest.approx(0.0707107)


def test_an_arm_with_more_than_twice_the_spread_is_compared_by_welch():
    """Variances 1 and 0.01, three each. Welch's error and freedom by scipy.stats.ttest_ind: 0.580230 and 2.0399."""
    three = rows(a=[1.0, 2.0, 3.0], b=[10.0, 10.1, 9.9], c=[20.0, 20.1, 19.9])
    found = compare(three, A, B, "loss")
    assert (found.error, found.freedom) == (pytest.approx(0.5802298), 2)
    calm = compare(three, B, {"arm": "c"}, "loss")  # the noisy arm is not in their pool
    assert (calm.error, calm.freedom) == (pytest.approx(0.0816497), 4)
    # Twice the standard deviation is the limit: with 1.9 times it is pooled, (0.0361 + 0.01 + 0.01) / 3.
    for off, error, freedom in ((0.19, math.sqrt(0.0187 * 2 / 3), 6), (0.21, math.sqrt((0.0441 + 0.01) / 3), 2)):
        near = compare(rows(a=[1 - off, 1.0, 1 + off], b=[2.0, 2.1, 1.9], c=[3.0, 3.1, 2.9]), A, B, "loss")
        assert (near.error, near.freedom) == (pytest.approx(error), freedom)


def test_the_error_of_the_text_is_the_limit_of_a_paired_bootstrap_over_blocks():
    """Means over seeds: 1 2 3 4 and 1 1 3 2; differences 0 1 0 2, variance 11 / 12, error sqrt(11 / 48)."""
    error, freedom = noise.text_error(LEFT, RIGHT, "loss")
    assert (error, freedom) == (pytest.approx(math.sqrt(11 / 48)), 3)
    resampled = [statistics.mean(drawn) for drawn in itertools.product([0, 1, 0, 2], repeat=4)]  # all 256 resamples
    assert statistics.pvariance(resampled) == pytest.approx(3 / 4 * error**2)  # a bootstrap's is smaller by 1 - 1 / 4
    bits = [[{**row, "bits_per_byte": 2 * row["loss"]} for row in side] for side in (LEFT, RIGHT)]
    assert noise.text_error(*bits, "bits_per_byte")[0] == pytest.approx(2 * error)
    for other in ({"text": "another"}, {"loss_blocks": None}):
        changed = [{key: value for key, value in {**row, **other}.items() if value is not None} for row in RIGHT]
        assert noise.text_error(LEFT, changed, "loss") is None
    assert noise.text_error(LEFT, RIGHT, "unigram") is None
    nothing = [{"seed": 0, "text": "t", "accuracy": 0.0, "accuracy_blocks": [0.0, 0.0]}]  # learned nothing at all
    assert noise.text_error(nothing, nothing, "accuracy") == (0.0, 1)
    assert noise.text_error([{**nothing[0], "accuracy_blocks": [0.0]}], nothing, "accuracy") is None


def test_the_errors_of_seeds_and_text_add_in_squares():
    """Seeds: variances 0.5 and 0.245, pooled 0.3725 with 2; text: 11 / 48 with 3. 0.36200 / (0.06938 + 0.01751)."""
    found = compare([*LEFT, *RIGHT], A, B, "loss")
    assert (found.value, found.error) == (pytest.approx(0.75), pytest.approx(math.sqrt(0.3725 + 11 / 48)))
    assert (found.freedom, found.complete) == (4, True)  # 4.1665 by Welch and Satterthwaite


def test_the_gain_over_a_baseline():
    """4 - 2.5, with 0.3725 / 2 for seeds and 5 / 12 for the blocks 1 2 3 4; freedom 4.833."""
    found = gain(LEFT, "loss", "unigram", -1.0, pooled([*LEFT, *RIGHT], "loss"))
    assert (found.value, found.error) == (1.5, pytest.approx(math.sqrt(0.18625 + 5 / 12)))
    assert (found.freedom, found.left, found.right) == (4, 2.5, 4.0)


def test_the_gain_of_an_arm_with_a_spread_of_its_own():
    """Variance 0.01 of three seeds, 100 times that of the others, which are left alone: 1e-4 with 4."""
    spread = rows(a=[1.0, 1.1, 0.9], b=[2.0, 2.01, 1.99], c=[3.0, 3.01, 2.99])
    for name, error, freedom in (("a", math.sqrt(0.01 / 3), 2), ("b", math.sqrt(1e-4 / 3), 4)):
        own = [{**row, "chance": 4.0} for row in spread if row["arm"] == name]
        found = gain(own, "loss", "chance", -1.0, pooled(spread, "loss"))
        assert (found.error, found.freedom) == (pytest.approx(error), freedom)


def test_quantiles_are_those_of_tables_of_students_t():
    for freedom, value in {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 8: 2.306, 30: 2.042, EXACT: 1.960}.items():
        assert f"{quantile(0.975, freedom):.3f}" == f"{value:.3f}"
    assert quantile(0.975, 0) == math.inf


def of(value, error=1.0, freedom=4, seeds=3, complete=True):
    return Difference(value, error, freedom, seeds, complete)


def test_verdicts_follow_from_intervals():
    """Student's t at 95 % is 3.18 for 3 degrees of freedom and 2.78 for 4; for ten pairs at 99.5 % it is 5.60 for 4."""
    for found, margin, verdict in (
        ([of(3.0)], 0.0, HOLDS),
        ([of(3.0, freedom=3)], 0.0, UNRESOLVED),
        ([of(-3.0)], 0.0, FAILS),
        ([of(3.0), of(-3.0)], 0.0, UNRESOLVED),
        ([of(9.0), of(-3.5)], 0.0, FAILS),
        ([of(-3.0), *[of(9.0)] * 9], 0.0, UNRESOLVED),
        ([of(math.nan)], 0.0, FAILS),  # diverged
        ([of(1.0, math.nan, 0)], 0.0, UNRESOLVED),
        ([of(0.0, 0.0)], 0.0, UNRESOLVED),
        ([], 0.0, UNRESOLVED),
        # An interval inside the margin is no difference, even if it excludes zero; a wider one is not resolved.
        ([of(0.1)], 3.0, SAME),
        ([of(3.0)], 6.0, SAME),
        ([of(3.0)], 5.5, HOLDS),
        ([of(0.1)], 2.0, UNRESOLVED),
        ([of(0.1), of(9.0)], 3.0, UNRESOLVED),
        # Two seeds, or a text whose error is unknown.
        ([of(9.0, seeds=2)], 0.0, INDICATION),
        ([of(-9.0, complete=False)], 0.0, INDICATION),
        ([of(0.1, seeds=2)], 3.0, UNRESOLVED),
        ([of(-9.0), of(-9.0, seeds=2)], 0.0, FAILS),
    ):
        assert noise.judge(found, margin=margin) == verdict, found
    assert noise.judge([of(9.0)], seeds=5) == INDICATION
    assert str(Difference(-1.0, 0.25, 2, 3, True, 1.0, 2.0)) == "1 against 2 (-1, -2.08 to +0.0757)"
    assert str(Difference(-1.0, math.nan, 0, 1, True, 1.0, 2.0)) == "1 against 2 (-1, one seed)"
