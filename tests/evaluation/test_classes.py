"""How a classifier is measured, and the baseline that sees which tokens a sequence has but not their order."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from subquad.data.toy import MarkedVotes
from subquad.evaluation import evaluate_classifier
from subquad.evaluation.classes import PENALTIES, _fitted, bags, fit_bag_of_tokens
from subquad.models import Classifier, EncoderConfig
from subquad.testing import assert_same_maths

CLASSES = ("zeros", "ones")
PENALTY = 1e-2


def tiny():
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=3, dim=16, num_layers=1, num_heads=2, attention="full", init_std=0.3, dropout=0.5)
    return Classifier(config)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_numbers_are_counted(batch_size):
    model, items = tiny().double().train(), MarkedVotes(25, 40)
    seen = []
    result = evaluate_classifier(
        model, items, 30, CLASSES, batch_size=batch_size, progress=lambda *counts: seen.append(counts)
    )
    assert model.training
    model.eval()
    right, losses = {0: [], 1: []}, []
    for i in range(30):
        item = items[i]
        logits = model(item["input_ids"][None], item["attention_mask"].bool()[None])
        label = int(item["labels"])
        right[label].append(int(logits.argmax()) == label)
        losses.append(F.cross_entropy(logits[0], item["labels"]).item())
    every = right[0] + right[1]
    assert result.examples == 30
    assert result.accuracy == sum(every) / 30
    assert result.constant == max(len(right[0]), len(right[1])) / 30
    assert result.by_class == {name: sum(right[i]) / len(right[i]) for i, name in enumerate(CLASSES)}
    losses = torch.tensor(losses, dtype=torch.float64)
    assert_same_maths(torch.tensor(result.loss, dtype=torch.float64), losses.mean())
    batches = -(-30 // batch_size)
    assert seen == [(done, batches) for done in range(1, batches + 1)]
    assert result.to_dict()["accuracy"] == result.accuracy


def test_a_class_that_does_not_occur_is_left_out():
    items = [item for item in (MarkedVotes(25, 40)[i] for i in range(40)) if int(item["labels"]) == 1]
    result = evaluate_classifier(tiny(), items, len(items), CLASSES)
    assert result.constant == 1
    assert list(result.by_class) == ["ones"]


# --- the baseline


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
    features, _ = bags([item([0, 0, 1], 1, pair=[1, 1, 9])], [0], 10)  # of three tokens and of two
    one, other = torch.tensor([[2 / 3, 1 / 3, math.log(3)], [0, 1, math.log(2)]], dtype=torch.float64)
    expected = torch.stack([one, other, (one - other).abs(), one * other])
    assert_same_maths(features.view(4, 11)[:, [0, 1, 10]], expected)


def test_each_sequence_of_a_pair_has_its_own_mask():
    class Longer(nn.Linear):
        def forward(self, tokens_BT, mask_BT, other_BT, other_mask_BT):
            return torch.stack([mask_BT.sum(1), other_mask_BT.sum(1)], 1).float()

    items = [item([0, 9, 9], 1, pair=[0, 1, 9]), item([0, 0, 0], 0, pair=[1, 1, 9])]
    assert evaluate_classifier(Longer(1, 1), items, 2, ("the first", "the second")).accuracy == 1


def test_a_class_of_one_example_is_fitted():
    """A share of each class chooses the penalty, but not a class's only example."""
    items = [item([0, 0, 0], 0), item([1, 1, 1], 1)]
    baseline = fit_bag_of_tokens(items, 2, vocab_size=2, classes=2)
    assert (baseline.penalty, baseline.accuracy(items, 2)) == (PENALTIES[0], 1)


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
    again = fit_bag_of_tokens(train, 400, vocab_size=10, classes=2)
    assert torch.equal(again.weight_FC, baseline.weight_FC)
    votes = fit_bag_of_tokens(MarkedVotes(25, 600), 600, vocab_size=3, classes=2)
    assert votes.accuracy(MarkedVotes(25, 600, held_out=True), 600) < 0.6  # 5 standard deviations above one half


def test_the_penalty_is_chosen_on_all_classes_in_whatever_order_they_come():
    # Labels come in turn: each tenth example has the same. How often a token comes is the label, which strong penalties
    # cannot tell for those in the middle.
    items = [item([0] * (number % 10) + [1] * (9 - number % 10), number % 10) for number in range(100)]
    baseline = fit_bag_of_tokens(items, 100, vocab_size=2, classes=10)
    assert baseline.penalty < PENALTIES[0]
    assert baseline.accuracy(items, 100) == 1


def test_only_some_examples_are_read(monkeypatch):
    monkeypatch.setattr("subquad.evaluation.classes.EXAMPLES", 20)
    items, read = some_items(100), []

    class Watched(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    fit_bag_of_tokens(Watched(items), 100, vocab_size=10, classes=2)
    assert read == list(range(0, 100, 5))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: evaluate_classifier(tiny(), MarkedVotes(25, 40), 4, CLASSES, batch_size=0), "batch_size must be at least"),
    (lambda: fit_bag_of_tokens(some_items(1), 1, vocab_size=10, classes=2),
     "a bag-of-tokens baseline needs at least 2 sequences to learn from, got 1"),
    (lambda: _fitted(torch.full((4, 2), torch.nan).double(), torch.tensor([0, 1, 0, 1]), 2, PENALTY),
     "the bag-of-tokens baseline could not be fitted: its loss is not finite"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises((ValueError, ArithmeticError), match=message):
        call()
