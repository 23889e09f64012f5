"""ListOps: the rules, the values by a stack machine, the distribution against trees that are drawn one by one."""

import math
import random

import numpy as np
import pytest

from subquad.data.config import ListOpsConfig
from subquad.data.lra.listops import BLOCK, CLOSE, MAX, MED, MIN, SM, VOCAB_SIZE, WORDS, make_block, read_words
from tests.data.lra.layouts import solve

FALSE_ALARM = 1e-6
"""How often a test of a distribution may fail by chance at another seed; here the seeds are fixed."""
SHORT = {"min_length": 4, "max_length": 40, "max_depth": 4}


def expressions(block) -> list[list[int]]:
    return [part.tolist() for part in np.split(block.tokens, np.cumsum(block.lengths)[:-1])]


def deviation(count: int) -> float:
    """How far a mean of `count` numbers in 0 to 1 is off with the probability FALSE_ALARM at most (Hoeffding)."""
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * count))


@pytest.mark.parametrize("changes", [
    {}, SHORT, SHORT | {"max_args": 3, "leaf": 0.5}, {"min_length": 10, "max_length": 100},
    {"min_length": 1, "max_length": 9, "max_depth": 2},
], ids=str)  # fmt: skip
def test_the_values_are_those_of_a_stack_machine_and_the_rules_are_kept(changes):
    config = ListOpsConfig(**changes)
    block = make_block(config.to_dict(), 3, 1)
    solved = [solve(tokens) for tokens in expressions(block)]
    assert [value for value, _ in solved] == block.labels.tolist()
    assert len(solved) == BLOCK
    assert config.min_length <= block.lengths.min() <= block.lengths.max() <= config.max_length
    assert max(depth for _, depth in solved) <= config.max_depth
    if not changes:  # Long Range Arena's rules: the mean is 1,040 and the median 958, of a larger sample
        assert {depth for _, depth in solved} == {10}
        assert abs(block.lengths.mean() - 1040) < (1999 - 501) * deviation(BLOCK)
        assert abs((block.lengths <= 958).mean() - 0.5) < deviation(BLOCK)


def test_the_distribution_is_that_of_trees_drawn_one_by_one():
    """Of lengths, of values, of each token's share: two samples of which one is drawn by recursion."""
    config, rng, wanted = ListOpsConfig(**SHORT), random.Random(5), 4 * BLOCK
    drawn = []

    def grow(depth: int = 1) -> list[int]:
        """A tree, node by node, as the rules say."""
        if depth == config.max_depth or rng.random() < config.leaf:
            return [rng.randrange(10)]
        parts = [grow(depth + 1) for _ in range(rng.randint(2, config.max_args))]
        return [rng.choice([MIN, MAX, MED, SM]), *(token for part in parts for token in part), CLOSE]

    while len(drawn) < wanted:
        tree = grow()
        if config.min_length <= len(tree) <= config.max_length:
            drawn.append(tree)
    made = [tree for number in range(4) for tree in expressions(make_block(config.to_dict(), 0, number))]

    def measures(tree):
        value, depth = solve(tree)
        return [
            *(len(tree) <= n for n in (6, 10, 16, 24, 32)),
            *(value == n for n in range(10)),
            *(tree.count(n) / len(tree) for n in range(VOCAB_SIZE)),
            *(tree[0] == n for n in (MIN, MAX, MED, SM)),
            *(depth <= n for n in (2, 3)),
            tree.index(CLOSE) / len(tree),
        ]

    one, other = (np.mean([measures(tree) for tree in trees], 0) for trees in (drawn, made))
    assert (abs(one - other) < 2 * deviation(wanted)).all()


def likely(count: int, share: float) -> range:
    """What a sum of `count` draws with the probability `share` is, but for FALSE_ALARM: exact binomial tails."""
    k = np.arange(count + 1)
    logs = np.array([math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k])
    below = np.cumsum(np.exp(logs + k * math.log(share) + (count - k) * math.log1p(-share)))
    return range(int((below < FALSE_ALARM / 2).sum()), int((below < 1 - FALSE_ALARM / 2).sum()) + 1)


def test_leaves_operators_and_numbers_of_arguments_have_their_shares():
    config = ListOpsConfig(max_depth=2, min_length=1, max_length=12)  # all trees of depth two
    trees = [tree for number in range(5) for tree in expressions(make_block(config.to_dict(), 1, number))]
    assert sum(len(tree) == 1 for tree in trees) in likely(len(trees), 3 / 4)
    for arguments in range(2, 11):
        assert sum(len(tree) == 2 + arguments for tree in trees) in likely(len(trees), 1 / 4 / 9)
    for operator in (MIN, MAX, MED, SM):
        assert sum(tree[0] == operator for tree in trees) in likely(len(trees), 1 / 16)
    digits = [token for tree in trees for token in tree if token < 10]
    for digit in range(10):
        assert digits.count(digit) in likely(len(digits), 1 / 10)


def test_the_words_of_the_release_are_read():
    assert read_words("( ( ( [MIN 3 ) 5 ) ] )").tolist() == [MIN, 3, 5, CLOSE]
    assert read_words(" ".join(WORDS)).tolist() == list(range(VOCAB_SIZE))
