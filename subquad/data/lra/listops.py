"""Generate ListOps: predict the value, a digit, of a nested expression such as [MAX 2 9 [MIN 4 7 ] 0 ].

The rules of Long Range Arena (Tay et al. 2020, arXiv:2011.04006, section 2.2.1; its file listops.py). A node is a digit
with probability 3/4, and always at the greatest depth; else it is one of four equally likely operators with two to ten
arguments. Expressions of 501 to 1,999 tokens are kept. Operators: MIN; MAX; MED, the median, rounded down for an even
number of arguments; SM, the sum modulo ten.

Many trees are drawn at once, depth by depth. Letters: N nodes of one depth, of all trees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from subquad.data.config import ListOpsConfig
from subquad.data.lra.store import Labelled

VERSION = 1
WORDS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""The word of each token."""
MIN, MAX, MED, SM, CLOSE = range(10, 15)
VOCAB_SIZE = len(WORDS)
CLASSES = tuple("0123456789")
BLOCK = 1000
"""Expressions in a block."""
DRAWN = 4000
"""Trees drawn at once."""
HOPELESS = 250
"""Give up after this many rounds of `DRAWN` trees without one to keep."""


class _Depth(NamedTuple):
    """The nodes of one depth, grouped by parent in the parents' order."""

    tree: np.ndarray
    """`[N]`, the tree of each node, ascending."""
    symbol: np.ndarray
    """`[N]`, a digit or an operator."""
    arguments: np.ndarray
    """`[N]`, the number of children at the next depth; 0 for a digit."""


def make_block(options: dict[str, Any], seed: int, number: int) -> Labelled:
    """Make `BLOCK` expressions and their values; each block number has its own random numbers.

    Raises `ValueError` if hardly any tree has a valid length.
    """
    config = ListOpsConfig.from_dict(options)
    rng = np.random.default_rng([seed, 2, number])
    made: list[Labelled] = []
    count = rounds = 0
    while count < BLOCK:
        kept = written(grown(config, rng, DRAWN), config)
        rounds += 1
        if len(kept.labels):
            made.append(kept)
            count += len(kept.labels)
        if rounds - len(made) >= HOPELESS and not made:
            raise ValueError(
                f"none of {rounds * DRAWN:,} trees has {config.min_length} to {config.max_length} tokens: widen "
                "listops.min_length and max_length, or change listops.max_depth, max_args or leaf"
            )
    joined = Labelled(*(np.concatenate(arrays) for arrays in zip(*made, strict=True)))
    lengths = joined.lengths[:BLOCK]
    return Labelled(joined.tokens[: lengths.sum()], lengths, joined.labels[:BLOCK])


def grown(config: ListOpsConfig, rng: np.random.Generator, trees: int) -> list[_Depth]:
    """Draw `trees` trees from the roots down; trees that get too long stop growing."""
    depths: list[_Depth] = []
    tree = np.arange(trees)
    length = np.ones(trees, dtype=np.int64)  # lower bounds: a node counts 1 until its arguments are known
    for depth in range(1, config.max_depth + 1):
        leaf = rng.random(len(tree)) < config.leaf if depth < config.max_depth else np.ones(len(tree), dtype=bool)
        arguments = np.where(leaf, 0, rng.integers(2, config.max_args, len(tree), endpoint=True))
        symbol = np.where(leaf, rng.integers(0, 10, len(tree)), rng.integers(MIN, SM, len(tree), endpoint=True))
        length += np.bincount(tree, np.where(leaf, 0, arguments + 1), trees).astype(np.int64)
        arguments[length[tree] > config.max_length] = 0
        depths.append(_Depth(tree, symbol, arguments))
        tree = np.repeat(tree, arguments)
        if not len(tree):
            break
    return depths


def written(depths: list[_Depth], config: ListOpsConfig) -> Labelled:
    """Return the trees of valid lengths as tokens, with their values."""
    lengths, values = _measured(depths)
    too_long = np.zeros(len(lengths[0]), dtype=bool)
    for depth in depths:  # trees that stopped growing have operators without arguments
        too_long[depth.tree[(depth.symbol >= MIN) & (depth.arguments == 0)]] = True
    kept = (lengths[0] >= config.min_length) & (lengths[0] <= config.max_length) & ~too_long
    sizes = np.where(kept, lengths[0], 0)
    tokens = np.empty(sizes.sum(), dtype=np.uint8)
    place = np.cumsum(sizes) - sizes
    for i, depth in enumerate(depths):
        mine = kept[depth.tree]
        tokens[place[mine]] = depth.symbol[mine]
        inner = mine & (depth.arguments > 0)
        tokens[place[inner] + lengths[i][inner] - 1] = CLOSE
        if i + 1 < len(depths):
            before = np.cumsum(lengths[i + 1]) - lengths[i + 1]  # tokens of all earlier nodes of this depth
            first = np.cumsum(depth.arguments) - depth.arguments
            start = place + 1 - before[np.minimum(first, len(before) - 1)]
            place = before + np.repeat(start, depth.arguments)
    return Labelled(tokens, lengths[0][kept], values[0][kept])


def _measured(depths: list[_Depth]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the length of each node's expression and its value, `[N]` for each depth, computed from the deepest up."""
    lengths = [np.ones(len(depth.tree), dtype=np.int64) for depth in depths]
    values = [depth.symbol.copy() for depth in depths]
    for i in reversed(range(len(depths) - 1)):
        (inner,) = np.nonzero(depths[i].arguments)
        if not len(inner):
            continue
        count = depths[i].arguments[inner]
        first = np.cumsum(count) - count
        below, operator = values[i + 1], depths[i].symbol[inner]
        lengths[i][inner] = 2 + np.add.reduceat(lengths[i + 1], first)
        owner = np.repeat(np.arange(len(inner)), count)
        ordered = np.sort(owner * 10 + np.where(below < 10, below, 0)) % 10  # an unfinished operator's value is unused
        middle = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
        results = {
            MIN: ordered[first],
            MAX: ordered[first + count - 1],
            MED: middle,
            SM: np.add.reduceat(ordered, first) % 10,
        }
        values[i][inner] = np.select([operator == name for name in results], list(results.values()))
    return lengths, values


def read_words(text: str) -> np.ndarray:
    """Return the tokens of `( ( [MIN 3 ) 5 ) ] )`, without ( and ); `ValueError` at the first unknown word."""
    words = [word for word in text.split() if word not in "()"]
    if unknown := next((word for word in words if word not in _TOKENS), None):
        raise ValueError(f"{unknown[:40]!r} is not a word of ListOps; valid: {' '.join(WORDS)}")
    return np.array([_TOKENS[word] for word in words], dtype=np.uint8)


_TOKENS = {word: token for token, word in enumerate(WORDS)}
