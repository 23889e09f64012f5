"""Augmentations keep the labels: which changes they make, and that an expression keeps its value."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.augment import augmentation, check_whole, permuted_expression
from subquad.data.lra.listops import CLOSE, MAX, MIN, SM
from subquad.training import ClassifyConfig
from tests.data.lra.layouts import solve

expressions = st.recursive(
    st.integers(0, 9).map(lambda digit: [digit]),
    lambda inner: st.builds(
        lambda operator, arguments: [operator, *(token for part in arguments for token in part), CLOSE],
        st.integers(MIN, SM),
        st.lists(inner, min_size=2, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(expressions, st.integers(0, 100))
def test_a_permuted_expression_keeps_its_tokens_and_value(tokens, seed):
    made = permuted_expression(tokens, np.random.default_rng(seed))
    assert sorted(made) == sorted(tokens)
    assert solve(made) == solve(tokens)


def test_arguments_take_every_order_and_truncated_expressions_stay():
    rng = np.random.default_rng(0)
    whole, truncated = [MAX, 1, MIN, 2, 3, CLOSE, 4, CLOSE], [MAX, 1, MIN, 2, 3]
    assert len({tuple(permuted_expression(whole, rng)) for _ in range(200)}) == 6 * 2
    assert permuted_expression(truncated, rng) == truncated


def augmented(dataset, tokens, **more):
    torch.manual_seed(0)
    mask = torch.ones_like(tokens)
    return augmentation(dataset)({"input_ids": tokens, "attention_mask": mask, "labels": None} | more)


def test_listops_keeps_its_padding_and_its_input():
    tokens = torch.tensor([[SM, 1, 2, 3, 4, 5, 6, CLOSE, 0, 0]] * 2)
    before = tokens.clone()
    made = augmented("listops", tokens, attention_mask=(torch.arange(10) < 8).long().expand(2, 10))["input_ids"]
    assert torch.equal(tokens, before)
    assert not torch.equal(made, tokens)
    assert not made[:, 8:].any()
    assert torch.equal(made[:, 1:7].sort(1).values, tokens[:, 1:7])


def test_pathfinder_is_rotated_and_mirrored_in_eight_equally_likely_ways():
    image = torch.arange(16).view(4, 4)
    made = augmented("pathfinder32", image.view(1, 16).expand(800, 16))["input_ids"]
    ways, counts = made.unique(dim=0, return_counts=True)
    expected = {tuple(way.flatten().tolist()) for i in range(4) for way in (image.rot90(i), image.rot90(i).T)}
    assert {tuple(way.tolist()) for way in ways} == expected
    assert counts.min() > 40  # of 100 expected: 6 standard deviations


def test_images_are_mirrored_and_shifted_by_up_to_an_eighth():
    image = torch.arange(1, 65).view(8, 8)
    made = augmented("image", image.view(1, 64).expand(300, 64))["input_ids"]
    padded = torch.nn.functional.pad(torch.stack([image, image.flip(1)]), (1, 1, 1, 1))
    expected = padded.unfold(1, 8, 1).unfold(2, 8, 1).reshape(-1, 64)
    assert sorted(set(map(tuple, made.tolist()))) == sorted(map(tuple, expected.tolist()))


def test_pairs_are_swapped_whole():
    one, other = torch.zeros(64, 3, dtype=torch.int64), torch.ones(64, 3, dtype=torch.int64)
    made = augmented("retrieval", one, pair_input_ids=other, pair_attention_mask=torch.full_like(one, 7))
    swapped = made["input_ids"][:, 0] == 1
    assert 10 < swapped.sum().item() < 54
    assert torch.equal(made["pair_input_ids"][:, 0] == 0, swapped)
    assert torch.equal(made["attention_mask"][:, 0] == 7, swapped)
    assert torch.equal(made["pair_attention_mask"][:, 0] == 1, swapped)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: check_whole("image", np.array([[16], [17]]), 16), "needs whole images of 17 pixels, got batch.length=16"),
    (lambda: check_whole("pathfinder32", np.array([[20]]), 16), "needs whole images of 20 pixels, got batch.length=16"),
    (lambda: augmented("image", torch.zeros(2, 15)), "needs square images, got batch.length=15"),
    (lambda: augmentation("text"), "dataset 'text' cannot be augmented; valid: image, pathfinder, listops, retrieval"),
    (lambda: ClassifyConfig(augment=True), "'toy'"),
])  # fmt: skip
def test_other_data_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    check_whole("image", np.array([[16], [16]]), 16)
    check_whole("listops", np.array([[5], [30]]), 16)
