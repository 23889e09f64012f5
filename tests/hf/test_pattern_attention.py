"""Attention over patterns with a transformers model's own queries and keys: dtypes, dropout, memory, masks."""

import pytest
import torch
from torch.nn import functional as F
from transformers.masking_utils import sliding_window_causal_mask_function

from subquad.hf.pattern_attention import KeyLayout, attend_over, mask_with_offset, parts_of, read_layout
from subquad.testing import assert_in_budget, assert_same_maths
from subquad.testing.tools import LINEAR_GROWTH, largest_allocation
from tests.hf.small import STOCK_OPTIONS, stock, stock_tokens
from tests.hf.test_interface import seen
from tests.models.small import assert_refused

every_mechanism = pytest.mark.parametrize("name", STOCK_OPTIONS)


def inputs(T, B=2, dtype=torch.float64):
    """Queries of 4 heads, and keys and values of 2."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(B, G, T, 8, generator=generator, dtype=torch.float64).to(dtype) for G in (4, 2, 2)]


@every_mechanism
def test_bfloat16_is_as_near_as_the_plain_form(name):
    q, k, v = inputs(21, dtype=torch.bfloat16)
    mask_BHTS = seen(name, 21)
    shared = [x.repeat_interleave(2, 1) for x in (k, v)]
    exact = F.scaled_dot_product_attention(q.double(), *(x.double() for x in shared), attn_mask=mask_BHTS, scale=0.3)
    plain = F.scaled_dot_product_attention(q, *shared, attn_mask=mask_BHTS, scale=0.3)
    ours = attend_over(q, k, v, parts_of(name, 4, STOCK_OPTIONS[name]), KeyLayout(0, None), 0.3, 0.0)
    assert ours.dtype == torch.bfloat16
    assert_in_budget(ours, plain, exact, torch.bfloat16, name)


@every_mechanism
def test_dropout_acts_on_the_weights(name):
    q, k, _ = inputs(8)
    v = torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8)  # the outputs are the weights
    parts = parts_of(name, 4, STOCK_OPTIONS[name])
    weights = attend_over(q, k, v, parts, KeyLayout(0, None), None, 0.0)
    torch.manual_seed(2)
    dropped = attend_over(q, k, v, parts, KeyLayout(0, None), None, 0.25)
    kept = dropped != 0
    assert_same_maths(dropped[kept], weights[kept] / 0.75)
    assert 0 < (weights[~kept] > 0).sum() < kept.sum()


@pytest.mark.parametrize(("name", "left"), [
    ("llp", 0), *((name, 5) for name in ("window", "llp", "shifted", "dilated", "longformer", "bigbird")),
])  # fmt: skip
def test_memory_of_a_prompt_grows_with_its_length(name, left):
    def largest(T):
        q, k, v = (x.requires_grad_() for x in inputs(T, B=1))
        mask_BT = (torch.arange(T) >= left).long()[None]
        parts = parts_of(name, 4, STOCK_OPTIONS[name])

        def step():
            layout = read_layout(mask_with_offset(1, T, T, attention_mask=mask_BT), 1, T, T)
            attend_over(q, k, v, parts, layout, None, 0.0).sum().backward()

        return largest_allocation(step)

    assert largest(512) <= LINEAR_GROWTH * largest(256)


def test_options_are_integers_bools_and_strings():
    parts_of("llp", 4, {"segment": 8, "shifted_heads": True})
    assert_refused(
        (lambda: parts_of("llp", 4, {"segment": 8.5}), TypeError, r"must be an integer, a bool or a string, got 8\.5"),
        # Although 1 == True.
        (lambda: parts_of("llp", 4, {"segment": 8, "shifted_heads": 1}), (TypeError, ValueError), "shifted_heads"),
    )


def test_masks_that_are_refused():
    model, x_BT = stock("llama", "llp"), stock_tokens(2, 9)
    masks, packed = torch.ones(2, 1, 9, 9, dtype=torch.bool), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    short = torch.ones(1, 5)
    sliding = {"mask_function": sliding_window_causal_mask_function(4), "local_size": 4}
    assert_refused(
        (lambda: model(x_BT, masks), ValueError, r"does not support 4-D masks: give a 2-D .* of padding, got torch\.b"),
        (lambda: model(x_BT, position_ids=packed, use_cache=False), ValueError, "not packed documents"),
        (
            lambda: mask_with_offset(1, 5, 5, **sliding),
            ValueError,
            r"sliding or chunked layer \(of 4 tokens\) has one of",
        ),
        (lambda: mask_with_offset(1, 5, 5, mask_function=lambda *_: True), ValueError, "nor bidirectional attention"),
        (
            lambda: mask_with_offset(1, 5, 5, 2, 2),
            ValueError,
            r"from the first one, got keys from 2 on, 5 .* 2 to 6",
        ),
        (lambda: mask_with_offset(1, 5, 9, 2, attention_mask=short), ValueError, r"so far, \[1, 7\], got \[1, 5\]"),
        (lambda: read_layout(None, 1, 2, 5), ValueError, "2 queries, 5 keys and no mask that says where they stand"),
    )
    assert read_layout(None, 1, 5, 5) == KeyLayout(0, None)
