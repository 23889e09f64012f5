"""Exponents and crossovers of known curves."""

import torch

from experiments.harness.curves import crossover, exponent
from subquad.testing import assert_same_maths


def test_the_exponent_of_a_power_is_that_power():
    sizes = [3.0, 8.0, 50.0, 400.0]
    for power in (-2.5, 0.0, 1.0, 1.96):
        found = exponent(sizes, [0.7 * size**power for size in sizes])
        assert_same_maths(torch.tensor(found, dtype=torch.float64), torch.tensor(power, dtype=torch.float64))


def test_the_crossover_is_where_the_ratio_stays_above_one():
    assert crossover({100: 0.5, 10_000: 2.0}) == "1,000"  # the middle of the logarithms
    assert crossover({100: 2.0, 1000: 0.5, 100_000: 2.0}) == "10,000"  # the ratio stays above one only from there
    assert crossover({16: 1.5, 32: 3.0}) == "16 or less"
    assert crossover({16: 3.0, 32: 0.5}) == "no length up to 32"
