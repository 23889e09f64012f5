"""The toy task: solvable by order alone, balanced, repeatable, its two parts apart."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.labelled import toy
from subquad.data.toy import MARK, MARKED, ONE, ZERO, MarkedVotes
from subquad.testing import assert_exact


def real(item: dict[str, torch.Tensor]) -> list[int]:
    return item["input_ids"][item["attention_mask"].bool()].tolist()


@settings(max_examples=50)
@given(length=st.integers(15, 90), seed=st.integers(0, 5), index=st.integers(0, 9))
def test_the_label_is_the_majority_of_marked_symbols_and_counts_say_nothing(length, seed, index):
    item = MarkedVotes(length, 10, seed=seed)[index]
    tokens = real(item)
    marked = [after for before, after in itertools.pairwise(tokens) if before == MARK]
    assert int(item["labels"]) == int(2 * sum(marked) > MARKED)
    assert len(marked) == tokens.count(MARK) == MARKED
    assert MARK not in marked
    assert len(tokens) % 2 == 1
    assert tokens.count(ZERO) == tokens.count(ONE)
    assert max(15, length // 2) - 1 <= len(tokens) <= length
    assert item["input_ids"].shape == item["attention_mask"].shape == (length,)
    assert not item["input_ids"][len(tokens) :].any()
    assert {value.dtype for value in item.values()} == {torch.int64}


def test_an_item_depends_on_seed_part_and_index_alone_and_the_fingerprint_tells_tasks_apart():
    first, again = MarkedVotes(40, 10, seed=3)[7], MarkedVotes(40, 500, seed=3)[7]
    for name in first:
        assert_exact(first[name], again[name], name)
    assert not torch.equal(first["input_ids"], MarkedVotes(40, 10, seed=4)[7]["input_ids"])
    usual = {"length": 40, "examples": 10, "held_out": 5, "seed": 0}
    changes = [{}, {"length": 41}, {"examples": 11}, {"held_out": 6}, {"seed": 1}, {}]
    assert len({toy(**(usual | change)).fingerprint for change in changes}) == 5


def test_labels_and_lengths_occur_equally_and_no_held_out_sequence_is_in_the_training_part():
    items = [MarkedVotes(33, 600)[i] for i in range(600)]
    ones = sum(int(item["labels"]) for item in items)
    assert abs(ones - 300) < 4 * np.sqrt(150)  # four standard deviations of 600 fair coins
    assert {len(real(item)) for item in items} == set(range(15, 34, 2))
    corpus = toy(48, examples=600, held_out=200)
    train, held_out = ({tuple(real(part[i])) for i in range(len(part))} for part in (corpus.train, corpus.held_out))
    assert (len(train), len(held_out)) == (600, 200)
    assert not train & held_out
    assert (corpus.vocab_size, corpus.classes) == (3, ("marked zeros", "marked ones"))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: MarkedVotes(14, 10), "at least 15 tokens, got length=14"),
    (lambda: MarkedVotes(15, 0), "at least one example, got examples=0"),
    (lambda: MarkedVotes(15, 10)[10], "example 10 is out of range: there are 10"),
])  # fmt: skip
def test_bad_sizes_and_indices_are_refused(call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call()
