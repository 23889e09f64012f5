"""The tolerances fail when they should, and the tools of the contract do what they say."""

import sys
import time
from itertools import count

import pytest
import torch

import subquad.testing
from subquad.attention import Latte, build
from subquad.attention.laws import Law
from subquad.ops import linear_cross_entropy
from subquad.ops._torch import scan, softmax, tiles
from subquad.testing import (
    AttentionContract,
    assert_exact,
    assert_in_budget,
    assert_same_maths,
    block_sizes,
    check_law,
    largest_allocation,
    mask_with,
    sharpened,
    with_gradients,
)

ONES = torch.ones(3, dtype=torch.float64)


def test_exact_passes_the_same_bits_only():
    nan = torch.tensor([torch.nan, torch.inf, 1.0])
    assert_exact(nan, nan.clone())
    one = torch.ones(1)
    with pytest.raises(AssertionError, match="a number: "):
        assert_exact(torch.nextafter(one, 2 * one), one, "a number")
    with pytest.raises(AssertionError, match="dtype"):
        assert_exact(one, one.double())
    with pytest.raises(AssertionError, match="shape"):
        assert_exact(one, one[None])
    with pytest.raises(AssertionError, match="not equal"):
        assert_exact(torch.tensor([torch.nan]), one)


def test_same_maths_allows_rounding_and_nothing_more():
    assert_same_maths(ONES + 1e-12, ONES)
    assert_same_maths(torch.full_like(ONES, -torch.inf), torch.full_like(ONES, -torch.inf))
    for wrong in (ONES + 1e-7, -ONES, ONES * torch.nan, ONES * torch.inf):
        with pytest.raises(AssertionError, match="a result: "):
            assert_same_maths(wrong, ONES, "a result")
    with pytest.raises(AssertionError, match="shape"):
        assert_same_maths(ONES[:1], ONES)


@pytest.mark.parametrize("pair", [(ONES.float(), ONES), (ONES, ONES.float()), (ONES.float(), ONES.float())])
def test_same_maths_is_for_float64(pair):
    with pytest.raises(TypeError, match=r"assert_same_maths compares float64, got torch\.float"):
        assert_same_maths(*pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_budget_is_twice_the_plain_error_and_one_rounding(dtype):
    eps, nothing = torch.finfo(dtype).eps, torch.zeros(2, 0, 3)
    assert_in_budget(nothing, nothing, nothing, dtype)
    exact = torch.tensor([4.0, -1.0], dtype=torch.float64)
    assert_in_budget(exact + 3.9 * eps, exact, exact, dtype)
    assert_in_budget(exact + 5.9 * eps, exact + eps, exact, dtype)
    for actual, plain in ((exact + 4.1 * eps, exact), (exact + 6.1 * eps, exact + eps)):
        with pytest.raises(AssertionError, match=r"an output: error .* exceeds .* "):
            assert_in_budget(actual, plain, exact, dtype, "an output")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_budget_has_no_room_for_what_is_not_finite(bad):
    for actual, plain in ((ONES * bad, ONES), (ONES, ONES * bad)):
        with pytest.raises(AssertionError, match="exceeds"):
            assert_in_budget(actual, plain, ONES, torch.float32)


def test_block_sizes_reach_the_engines_and_end_with_their_block(monkeypatch):
    def sizes():
        return [scan.CHUNK, softmax.CHUNK, tiles.MASKED_ROWS]

    before = sizes()
    with block_sizes(4):
        assert sizes() == [4, 4, 4]
    assert sizes() == before
    with pytest.raises(RuntimeError, match="inside"), block_sizes(4):
        raise RuntimeError("inside")
    assert sizes() == before
    groups = []
    of_scan = scan.chunk_groups
    monkeypatch.setattr(scan, "chunk_groups", lambda *a, **b: groups.append(of_scan(*a, **b)) or of_scan(*a, **b))
    with block_sizes(4):
        build("linear", dim=4, num_heads=1)(torch.randn(1, 10, 4))
    assert groups[0] == [(0, 8, 2, 4, 0), (8, 10, 1, 2, 2)], "two chunks of 4 tokens, one of 2"


def test_the_largest_allocation_is_seen_inside_custom_operations_too():
    assert largest_allocation(lambda: torch.ones(10, 10).sum()) == 400
    logits = 4 * 64 * 100
    h, weight, labels = torch.ones(64, 8), torch.ones(100, 8), torch.zeros(64, dtype=torch.int64)
    assert largest_allocation(lambda: linear_cross_entropy(h, weight, labels)) >= logits


def test_masks_have_padding_on_both_sides_and_a_hole():
    mask = mask_with([(1, 4, 1), (0, 3, 3)])
    assert mask.tolist() == [[False, True, True, False, True, False], [True, True, True, False, False, False]]


@pytest.mark.parametrize("law", [
    "test_split_anywhere_gives_the_same_result", "test_no_future_token_changes_a_bit",
])  # fmt: skip
def test_a_slow_first_call_breaks_no_law(law):
    """Whatever profile of hypothesis is loaded, and when."""

    class Slow(AttentionContract):
        name, calls = "linear", count()

        def new(self, num_heads):
            time.sleep(0.3 if next(self.calls) == 0 else 0)
            return super().new(num_heads)

    getattr(Slow(), law)()


@pytest.mark.parametrize("name", ["full", "linear"])
def test_sharpened_scales_logits(name):
    layer, x = build(name, dim=8, num_heads=2).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    q, k = layer.query(x), layer.key(x)
    sharpened(layer, 100.0)
    factor = 10.0 if name == "full" else 100.0
    assert_same_maths(layer.query(x), factor * q)
    assert_same_maths(layer.key(x), factor * k)


def test_gradients_are_of_every_parameter():
    layer = build("full", dim=8, num_heads=2, bias=True).double()
    results = with_gradients(layer, lambda x: layer(x)[0], torch.randn(1, 5, 8, dtype=torch.float64))
    assert set(results) == {"output", "gradient of x", *(f"gradient of {n}" for n, _ in layer.named_parameters())}
    again = with_gradients(layer, lambda x: 0 * layer(x)[0], torch.randn(1, 5, 8, dtype=torch.float64))
    assert_exact(again["gradient of x"], torch.zeros(1, 5, 8, dtype=torch.float64))


def test_the_contract_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "subquad.testing.contract")
    match = r"AttentionContract needs hypothesis, which is not installed: .* pip install 'subquad\[testing\]'"
    with pytest.raises(ImportError, match=match):
        subquad.testing.AttentionContract  # noqa: B018


def test_a_law_is_a_function():
    """`check_law` judges by every test of the law, and says which do not apply."""
    assert check_law("padding", "latte", num_latents=4) == []
    reason = "bidirectional: reads whole sequences and keeps no state"
    assert check_law(Law.SPLIT, "latte", causal=False) == [f"latte, law 'split': {reason}"]
    assert check_law("padding", "latte", causal=False) == [reason]
    with pytest.raises(ValueError, match="unknown law 'splt'; did you mean 'split'"):
        check_law("splt", "latte")
    with pytest.raises(ValueError, match="unknown attention 'late'; did you mean 'latte'"):
        check_law("split", "late")
    for own in (Latte, Latte(dim=8, num_heads=2)):
        with pytest.raises(TypeError, match=r"give the mechanism's name .* check_law\('split', 'latte', .*Latte"):
            check_law("split", own)


def test_a_law_as_a_function_finds_a_layer_that_breaks_it(monkeypatch):
    monkeypatch.setattr(Latte, "forward", lambda layer, x, state=None, **given: (x + x.roll(1, 1), None))
    with pytest.raises(AssertionError, match="outputs before and at token"):
        check_law(Law.NO_FUTURE, "latte")
