"""ListOps: the rules, the values by a stack machine, the distribution against trees that are drawn one by one."""

import math
import random

import numpy as np
import pytest

from subquad.data.config import ListOpsConfig
from subquad.data.lra.listops import BLOCK, CLOSE, MAX, MED, MIN, SM, VOCAB_SIZE, WORDS, make_block, read_words

FALSE_ALARM = 1e-6
"""How often a test of a distribution may fail by chance at another seed; here the seeds are fixed."""
SHORT = {"min_length": 4, "max_length": 40, "max_depth": 4}


def solve(tokens: list[int]) -> tuple[int, int]:
    """The value of an expression and the depth of its deepest node, by a stack."""
    stack: list[tuple[int, int]] = []
    deepest, open_ = 0, 0
    for token in tokens:
        if token == CLOSE:
            arguments = []
            while stack[-1][0] < MIN:
                arguments.append(stack.pop()[0])
            arguments.sort()
            operator = stack.pop()[0]
            assert 2 <= len(arguments) <= 10
            middle = len(arguments) // 2
            median = arguments[middle] if len(arguments) % 2 else (arguments[middle - 1] + arguments[middle]) // 2
            value = {MIN: arguments[0], MAX: arguments[-1], MED: median, SM: sum(arguments) % 10}[operator]
            open_ -= 1
            stack.append((value, 0))
        else:
            stack.append((token, 0))
            deepest = max(deepest, open_ + 1)
            open_ += token >= MIN
    assert len(stack) == 1
    return stack[0][0], deepest


def grow(rng: random.Random, config: ListOpsConfig, depth: int = 1) -> list[int]:
    """A tree, node by node, as the rules say."""
    if depth == config.max_depth or rng.random() < config.leaf:
        return [rng.randrange(10)]
    parts = [grow(rng, config, depth + 1) for _ in range(rng.randint(2, config.max_args))]
    return [rng.choice([MIN, MAX, MED, SM]), *(token for part in parts for token in part), CLOSE]


def expressions(block) -> list[list[int]]:
    return [part.tolist() for part in np.split(block.tokens, np.cumsum(block.lengths)[:-1])]


@pytest.fixture(scope="module")
def usual():
    return make_block(ListOpsConfig().to_dict(), 0, 0)


def deviation(count: int) -> float:
    """How far a mean of `count` numbers in 0 to 1 is off with the probability FALSE_ALARM at most (Hoeffding)."""
    return math.sqrt(math.log(2 / FALSE_ALARM) / (2 * count))


def test_the_values_are_those_of_a_stack_machine(usual):
    solved = [solve(tokens) for tokens in expressions(usual)]
    assert [value for value, _ in solved] == usual.labels.tolist()
    assert {depth for _, depth in solved} == {10}
    assert len(solved) == BLOCK
    assert usual.lengths.min() >= 501
    assert usual.lengths.max() <= 1999


@pytest.mark.parametrize("changes", [
    SHORT,
    SHORT | {"max_args": 3, "leaf": 0.5},
    {"min_length": 10, "max_length": 100},
    {"min_length": 1, "max_length": 9, "max_depth": 2},
])  # fmt: skip
def test_other_rules_are_kept_too(changes):
    config = ListOpsConfig(**changes)
    block = make_block(config.to_dict(), 3, 1)
    solved = [solve(tokens) for tokens in expressions(block)]
    assert [value for value, _ in solved] == block.labels.tolist()
    assert max(depth for _, depth in solved) <= config.max_depth
    assert config.min_length <= block.lengths.min()
    assert block.lengths.max() <= config.max_length


def test_the_distribution_is_that_of_trees_drawn_one_by_one():
    """Of lengths, of values, of each token's share: two samples of which one is drawn by recursion."""
    config = ListOpsConfig(**SHORT)
    rng, wanted = random.Random(5), 4 * BLOCK
    drawn = []
    while len(drawn) < wanted:
        tree = grow(rng, config)
        if config.min_length <= len(tree) <= config.max_length:
            drawn.append(tree)
    blocks = [expressions(make_block(config.to_dict(), 0, number)) for number in range(4)]
    made = [tree for block in blocks for tree in block]
    allowed = 2 * deviation(wanted)
    for measure in (
        *(lambda tree, n=n: len(tree) <= n for n in (6, 10, 16, 24, 32)),
        *(lambda tree, n=n: solve(tree)[0] == n for n in range(10)),
        *(lambda tree, n=n: tree.count(n) / len(tree) for n in range(VOCAB_SIZE)),
        *(lambda tree, n=n: tree[0] == n for n in (MIN, MAX, MED, SM)),
        *(lambda tree, n=n: solve(tree)[1] <= n for n in (2, 3)),
        lambda tree: tree.index(CLOSE) / len(tree),
    ):
        difference = abs(np.mean([measure(tree) for tree in drawn]) - np.mean([measure(tree) for tree in made]))
        assert difference < allowed


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


def test_the_usual_lengths_are_those_that_were_published(usual):
    """Mean 1,040 and median 958 of the rules in a sample of their own; here of 1,000 expressions."""
    spread = (1999 - 501) * deviation(BLOCK)
    assert abs(usual.lengths.mean() - 1040) < spread
    below = (usual.lengths <= 958).mean()
    assert abs(below - 0.5) < deviation(BLOCK)


def test_a_block_depends_on_its_seed_and_number_alone():
    options = ListOpsConfig(**SHORT).to_dict()
    first, again = make_block(options, 1, 2), make_block(options, 1, 2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    for seed, number in ((1, 3), (2, 2), (2, 1)):
        other = make_block(options, seed, number)
        assert other.tokens.shape != first.tokens.shape or (other.tokens != first.tokens).any()


def test_rules_that_no_tree_keeps_end():
    options = ListOpsConfig(min_length=1990, max_length=1990, leaf=0.999).to_dict()
    with pytest.raises(ValueError, match=r"none of 1,000,000 trees has 1990 to 1990 tokens: widen listops.min_length"):
        make_block(options, 0, 0)


def test_the_words_of_the_release_are_read():
    assert read_words("( ( ( [MIN 3 ) 5 ) ] )").tolist() == [MIN, 3, 5, CLOSE]
    assert read_words(" ".join(WORDS)).tolist() == list(range(VOCAB_SIZE))
    with pytest.raises(ValueError, match=r"'\[AVG' is no word of ListOps; valid: 0 1 2"):
        read_words("( [AVG 3 ] )")


@pytest.mark.parametrize(("changes", "message"), [
    ({"max_depth": 1}, "listops.max_depth must be at least 2, got 1"),
    ({"max_args": 1}, "listops.max_args must be at least 2, got 1"),
    ({"min_length": 0}, "listops.min_length must be at least 1, got 0"),
    ({"leaf": 1.0}, "listops.leaf must lie between 0 and 1, both excluded, got 1.0"),
    ({"max_length": 500}, "listops.max_length must be at least min_length=501, got 500"),
    ({"max_depth": 3}, "listops.min_length=501 is above the 122 tokens of the longest expression with max_depth=3"),
])  # fmt: skip
def test_wrong_rules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ListOpsConfig(**changes)
