"""ListOps: the rules, the values by a stack machine, the shares of all choices."""

import math

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
        allowed = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * BLOCK))  # Hoeffding's bound
        assert {depth for _, depth in solved} == {10}
        assert abs(block.lengths.mean() - 1040) < (1999 - 501) * allowed
        assert abs((block.lengths <= 958).mean() - 0.5) < allowed


def likely(count: int, share: float) -> range:
    """What a sum of `count` draws with the probability `share` is, but for FALSE_ALARM: exact binomial tails."""
    k = np.arange(count + 1)
    logs = np.array([math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k])
    below = np.cumsum(np.exp(logs + k * math.log(share) + (count - k) * math.log1p(-share)))
    return range(int((below < FALSE_ALARM / 2).sum()), int((below < 1 - FALSE_ALARM / 2).sum()) + 1)


def trees_of(**options) -> list[list[int]]:
    options = ListOpsConfig(**options).to_dict()
    return [tree for number in range(5) for tree in expressions(make_block(options, 1, number))]


def test_leaves_operators_and_numbers_of_arguments_have_their_shares():
    trees = trees_of(max_depth=2, min_length=1, max_length=12)  # all trees of depth two
    assert sum(len(tree) == 1 for tree in trees) in likely(len(trees), 3 / 4)
    for arguments in range(2, 11):
        assert sum(len(tree) == 2 + arguments for tree in trees) in likely(len(trees), 1 / 4 / 9)
    for operator in (MIN, MAX, MED, SM):
        assert sum(tree[0] == operator for tree in trees) in likely(len(trees), 1 / 16)


def test_lengths_are_chosen_without_changing_the_shares_of_inner_nodes():
    trees = trees_of(max_depth=3, max_args=2, leaf=0.5, min_length=4, max_length=7)  # not 1 or 10 tokens
    assert sum(len(tree) == 4 for tree in trees) in likely(len(trees), 1 / 3)
    deep = [tree for tree in trees if len(tree) == 7]
    assert sum(tree[1] >= MIN for tree in deep) in likely(len(deep), 1 / 2)
    inner = [token for tree in deep for token in tree[1:-1] if token >= MIN and token != CLOSE]
    for operator in (MIN, MAX, MED, SM):
        assert inner.count(operator) in likely(len(deep), 1 / 4)
        assert sum(tree[0] == operator for tree in deep) in likely(len(deep), 1 / 4)
    digits = [token for tree in trees for token in tree if token < 10]
    for digit in range(10):
        assert digits.count(digit) in likely(len(digits), 1 / 10)


def test_the_words_of_the_release_are_read():
    assert read_words("( ( ( [MIN 3 ) 5 ) ] )").tolist() == [MIN, 3, 5, CLOSE]
    assert read_words(" ".join(WORDS)).tolist() == list(range(VOCAB_SIZE))
