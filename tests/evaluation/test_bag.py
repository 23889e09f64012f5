"""The baseline that sees which tokens a sequence has and not their order."""

import pytest
import torch
from torch.nn import functional as F

from subquad.data.toy import MarkedVotes
from subquad.evaluation.classes import PENALTIES, _fitted, bags, fit_bag_of_tokens
from subquad.testing import assert_same_maths

PENALTY = 1e-2


def item(tokens, label, pair=None):
    made = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(tokens).ne(9).long()}
    if pair is not None:
        made |= {"pair_input_ids": torch.tensor(pair), "pair_attention_mask": torch.tensor(pair).ne(9).long()}
    return {**made, "labels": torch.tensor(label)}


def some_items(count, seed=0):
    """Which of tokens 0 and 1 comes more often, among others; 9 is padding."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        tokens = torch.randint(4, (11,), generator=generator)
        tokens[8:] = 9
        items.append(item(tokens.tolist(), int((tokens == 0).sum() > (tokens == 1).sum())))
    return items


def test_the_features_are_frequencies_and_the_length():
    features, labels = bags([item([0, 2, 2, 9], 1), item([1, 9, 9, 9], 0)], range(2), 10)
    assert features.shape == (2, 11)
    assert_same_maths(features[0, :3], torch.tensor([1 / 3, 0, 2 / 3], dtype=torch.float64))
    assert_same_maths(features[:, 10], torch.tensor([3.0, 1.0], dtype=torch.float64).log())
    assert not features[:, 9].any()
    assert labels.tolist() == [1, 0]


def test_a_pair_has_both_their_differences_and_products():
    features, _ = bags([item([0, 0, 1], 1, pair=[1, 1, 1])], [0], 2)
    third = torch.tensor(3.0, dtype=torch.float64)
    one = torch.stack([2 / third, 1 / third, third.log()])
    other = torch.stack([0 / third, 1 + 0 / third, third.log()])
    assert_same_maths(features[0], torch.cat([one, other, (one - other).abs(), one * other]))


def test_the_fit_is_where_the_gradient_is_zero():
    features, labels = bags(some_items(200), range(200), 10)
    z = (features - features.mean(0)) / features.std(0, correction=0).clamp(min=1e-9)
    weight, bias = (value.requires_grad_() for value in _fitted(z, labels, 2, PENALTY))
    loss = F.cross_entropy(z @ weight + bias, labels) + PENALTY / 2 * weight.square().sum()
    start = F.cross_entropy(torch.zeros(200, 2, dtype=torch.float64), labels)
    assert loss.item() < 0.7 * start.item()
    for gradient in torch.autograd.grad(loss, (weight, bias)):
        assert gradient.abs().max().item() < 1e-4


def test_it_learns_what_counts_say_and_nothing_else():
    train, test = some_items(400), some_items(400, seed=1)
    baseline = fit_bag_of_tokens(train, 400, vocab_size=10, classes=2)
    assert baseline.penalty in PENALTIES
    assert baseline.accuracy(test, 400) > 0.9
    votes = fit_bag_of_tokens(MarkedVotes(25, 600), 600, vocab_size=3, classes=2)
    assert votes.accuracy(MarkedVotes(25, 600, held_out=True), 600) < 0.6  # 5 standard deviations above one half


def test_the_penalty_is_chosen_on_all_classes_in_whatever_order_they_come():
    # Labels come in turn: each tenth example has the same. How often a token comes is the label, which strong penalties
    # cannot tell for those in the middle.
    items = [item([0] * (number % 10) + [1] * (9 - number % 10), number % 10) for number in range(100)]
    baseline = fit_bag_of_tokens(items, 100, vocab_size=2, classes=10)
    assert baseline.penalty < PENALTIES[0]
    assert baseline.accuracy(items, 100) == 1


def test_nothing_is_random():
    fits = [fit_bag_of_tokens(some_items(60), 60, vocab_size=10, classes=2) for _ in range(2)]
    assert torch.equal(fits[0].weight_FC, fits[1].weight_FC)
    assert fits[0].penalty == fits[1].penalty


def test_only_some_examples_are_read(monkeypatch):
    monkeypatch.setattr("subquad.evaluation.classes.EXAMPLES", 20)
    items, read = some_items(100), []

    class Watched(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    fit_bag_of_tokens(Watched(items), 100, vocab_size=10, classes=2)
    assert read == list(range(0, 100, 5))


def test_one_example_is_too_few():
    with pytest.raises(ValueError, match="a bag-of-tokens baseline needs at least 2 sequences to learn from, got 1"):
        fit_bag_of_tokens(some_items(1), 1, vocab_size=10, classes=2)


def test_a_loss_that_is_not_finite_is_said():
    z = torch.full((4, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(ArithmeticError, match="the bag-of-tokens baseline could not be fitted: its loss is not finite"):
        _fitted(z, torch.tensor([0, 1, 0, 1]), 2, PENALTY)
