"""Changes that keep the labels of sequences: which ones they are, and that the value of an expression stays."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.augment import augmentation, check_whole, permuted_expression
from subquad.data.lra.listops import CLOSE, MAX, MED, MIN, SM
from subquad.training import ClassifyConfig

expressions = st.recursive(
    st.integers(0, 9).map(lambda digit: [digit]),
    lambda inner: st.builds(
        lambda operator, arguments: [operator, *(token for part in arguments for token in part), CLOSE],
        st.integers(MIN, SM),
        st.lists(inner, min_size=2, max_size=4),
    ),
    max_leaves=20,
)


def value(tokens):
    """By a stack: each closing bracket puts the value of what stands after its operator."""
    stack = []
    for token in tokens:
        if token != CLOSE:
            stack.append(token)
            continue
        arguments = []
        while stack[-1] < MIN:
            arguments.append(stack.pop())
        arguments.sort()
        n = len(arguments)
        median = (arguments[(n - 1) // 2] + arguments[n // 2]) // 2
        stack.append({MIN: arguments[0], MAX: arguments[-1], MED: median, SM: sum(arguments) % 10}[stack.pop()])
    (result,) = stack
    return result


@settings(max_examples=100)
@given(expressions, st.integers(0, 100))
def test_a_permuted_expression_has_the_same_tokens_and_value(tokens, seed):
    made = permuted_expression(tokens, np.random.default_rng(seed))
    assert sorted(made) == sorted(tokens)
    assert value(made) == value(tokens)


def test_all_orders_of_the_arguments_come():
    rng = np.random.default_rng(0)
    tokens = [MAX, 1, MIN, 2, 3, CLOSE, 4, CLOSE]
    made = {tuple(permuted_expression(tokens, rng)) for _ in range(400)}
    assert len(made) == 6 * 2


def test_an_expression_that_was_cut_stays():
    tokens = [MAX, 1, MIN, 2, 3]
    assert permuted_expression(tokens, np.random.default_rng(0)) == tokens


def batch(tokens, **more):
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.zeros(len(tokens)), **more}


def test_listops_keeps_its_padding_and_its_input():
    torch.manual_seed(0)
    row = [SM, 1, 2, 3, 4, 5, 6, CLOSE]
    tokens = torch.tensor([[*row, 0, 0]] * 2)
    given = batch(tokens)
    given["attention_mask"][:, 8:] = 0
    before = tokens.clone()
    made = augmentation("listops")(given)["input_ids"]
    assert torch.equal(tokens, before)
    assert not torch.equal(made, tokens)
    assert not made[:, 8:].any()
    assert torch.equal(made[:, 1:7].sort(1).values, tokens[:, 1:7])


def test_pathfinder_is_turned_and_mirrored_in_all_eight_ways():
    torch.manual_seed(0)
    image = torch.arange(16).view(1, 16)
    made = augmentation("pathfinder32")(batch(image.expand(800, 16)))["input_ids"]
    ways, counts = made.unique(dim=0, return_counts=True)
    square = image.view(4, 4)
    expected = {tuple(turned.flatten().tolist()) for i in range(4) for turned in (square.rot90(i), square.rot90(i).T)}
    assert {tuple(way.tolist()) for way in ways} == expected
    assert counts.min() > 40  # of 100 expected: 6 standard deviations


def test_images_are_mirrored_left_to_right_and_shifted():
    torch.manual_seed(0)
    square = torch.arange(1, 65).view(8, 8)
    made = augmentation("image")(batch(square.view(1, 64).expand(900, 64)))["input_ids"].view(900, 8, 8)
    expected = set()
    for mirrored in (square, square.flip(1)):
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                moved = torch.zeros(10, 10, dtype=torch.int64)
                moved[1 + down : 9 + down, 1 + right : 9 + right] = mirrored
                expected.add(tuple(moved[1:9, 1:9].flatten().tolist()))
    assert {tuple(image.flatten().tolist()) for image in made} == expected


def test_pairs_are_swapped_whole():
    torch.manual_seed(0)
    one, other = torch.zeros(64, 3, dtype=torch.int64), torch.ones(64, 3, dtype=torch.int64)
    masks = {"pair_attention_mask": torch.full_like(one, 7)}
    made = augmentation("retrieval")(batch(one, pair_input_ids=other, **masks))
    swapped = made["input_ids"][:, 0] == 1
    assert 10 < swapped.sum().item() < 54
    assert torch.equal(made["pair_input_ids"][:, 0] == 0, swapped)
    assert torch.equal(made["attention_mask"][:, 0] == 7, swapped)
    assert torch.equal(made["pair_attention_mask"][:, 0] == 1, swapped)


def test_images_are_read_whole():
    for dataset, lengths in (("image", [16, 17]), ("pathfinder32", [20, 16])):
        with pytest.raises(ValueError, match=r"batch\.length=16 is not their (17|20); set it to that, or leave"):
            check_whole(dataset, np.array(lengths)[:, None], 16)
    check_whole("image", np.array([[16], [16]]), 16)
    check_whole("listops", np.array([[5], [30]]), 16)


def test_where_no_change_is_known_none_is_made():
    with pytest.raises(ValueError, match="no change is known to keep the labels of dataset 'text'"):
        augmentation("text")
    with pytest.raises(
        ValueError, match=r"classify\.augment=true has no label-preserving change for dataset 'toy'"
    ):
        ClassifyConfig(augment=True)
    with pytest.raises(ValueError, match=r"moves the pixels of square images, and batch\.length=15 is no square"):
        augmentation("image")(batch(torch.zeros(2, 15, dtype=torch.int64)))
