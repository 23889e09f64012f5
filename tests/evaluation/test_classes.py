"""How a classifier is measured."""

import pytest
import torch
from torch.nn import functional as F

from subquad.data.toy import MarkedVotes
from subquad.evaluation import evaluate_classifier
from subquad.models import Classifier, EncoderConfig
from subquad.testing import assert_same_maths

CLASSES = ("zeros", "ones")


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


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        evaluate_classifier(tiny(), MarkedVotes(25, 40), 0, CLASSES)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluate_classifier(tiny(), MarkedVotes(25, 40), 4, CLASSES, batch_size=0)
