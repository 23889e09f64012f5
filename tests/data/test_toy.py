"""The made-up classification task: solvable by order alone, balanced, repeatable, its two parts apart."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.labelled import toy
from subquad.data.toy import MARK, MARKED, ONE, ZERO, MarkedVotes, votes
from subquad.testing import assert_exact


def solve(tokens: list[int]) -> int:
    """The label, by counting."""
    marked = [after for before, after in itertools.pairwise(tokens) if before == MARK]
    return int(2 * sum(marked) > len(marked))


def real(item: dict[str, torch.Tensor]) -> list[int]:
    return item["input_ids"][item["attention_mask"].bool()].tolist()


@given(length=st.integers(15, 90), seed=st.integers(0, 5), index=st.integers(0, 9))
def test_the_label_is_what_most_marked_symbols_are_and_counts_say_nothing(length, seed, index):
    item = MarkedVotes(length, 10, seed=seed)[index]
    tokens = real(item)
    assert solve(tokens) == int(item["labels"])
    assert tokens.count(MARK) == MARKED
    assert tokens[-1] != MARK
    assert all(after != MARK for before, after in itertools.pairwise(tokens) if before == MARK)
    assert tokens.count(ZERO) == tokens.count(ONE)
    assert max(15, length // 2) - 1 <= len(tokens) <= length
    assert item["input_ids"].shape == item["attention_mask"].shape == (length,)
    assert not item["input_ids"][len(tokens) :].any()
    assert {value.dtype for value in item.values()} == {torch.int64}


def test_both_labels_and_all_lengths_occur_equally():
    items = [MarkedVotes(33, 2000)[i] for i in range(2000)]
    ones = sum(int(item["labels"]) for item in items)
    assert abs(ones - 1000) < 4 * np.sqrt(500)  # four standard deviations of 2,000 fair coins
    lengths = {len(real(item)) for item in items}
    assert lengths == {15, 17, 19, 21, 23, 25, 27, 29, 31, 33}


def test_an_item_is_the_same_at_every_call_and_whatever_the_number_of_examples():
    first, again = MarkedVotes(40, 10, seed=3)[7], MarkedVotes(40, 500, seed=3)[7]
    for name in first:
        assert_exact(first[name], again[name], name)
    other = MarkedVotes(40, 10, seed=4)[7]
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_no_held_out_sequence_is_in_the_training_part():
    corpus = toy(48, examples=1500, held_out=500)
    train = {tuple(real(corpus.train[i])) for i in range(len(corpus.train))}
    held_out = {tuple(real(corpus.held_out[i])) for i in range(len(corpus.held_out))}
    assert len(train) == 1500
    assert len(held_out) == 500
    assert not train & held_out


def test_the_fingerprint_tells_tasks_apart():
    def made(**changes):
        return toy(**({"length": 40, "examples": 10, "held_out": 5, "seed": 0} | changes)).fingerprint

    assert made() == made()
    others = [made(length=41), made(examples=11), made(held_out=6), made(seed=1)]
    assert len({made(), *others}) == 5


def test_the_corpus_says_what_a_model_needs():
    corpus = toy(40, examples=10, held_out=5)
    assert (corpus.vocab_size, corpus.classes) == (3, ("marked zeros", "marked ones"))
    assert (len(corpus.train), len(corpus.held_out)) == (10, 5)


@pytest.mark.parametrize("length", range(15, 60))
def test_every_length_has_a_sequence(length):
    tokens, label = votes(np.random.default_rng(length), length)
    assert len(tokens) == length - (length % 2 == 0)
    assert solve(tokens.tolist()) == label


def test_bad_sizes_and_places_are_refused():
    with pytest.raises(ValueError, match="at least 15 tokens, got length=14"):
        MarkedVotes(14, 10)
    with pytest.raises(ValueError, match="at least one example, got examples=0"):
        MarkedVotes(15, 0)
    with pytest.raises(IndexError, match="example 10 is out of range: there are 10"):
        MarkedVotes(15, 10)[10]
