import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.ops.padding import check_mask, compact, compaction, real_slots, scatter, zero_padding
from subquad.testing import assert_exact

masks = st.integers(0, 12).flatmap(
    lambda tokens: st.lists(st.lists(st.booleans(), min_size=tokens, max_size=tokens), min_size=1, max_size=3)
)


@settings(max_examples=50)
@given(rows=masks)
def test_compact_puts_the_real_tokens_first_in_their_order_and_scatter_undoes_it(rows):
    mask_BT = torch.tensor(rows, dtype=torch.bool)
    x_BTD, moved = torch.arange(1.0, mask_BT.numel() * 2 + 1).view(*mask_BT.shape, 2), compaction(mask_BT)
    y_BTD = compact(x_BTD, moved)
    for b, mask_T in enumerate(mask_BT):
        real = int(mask_T.sum())
        assert_exact(y_BTD[b, :real], x_BTD[b, mask_T])
        assert_exact(y_BTD[b, real:], torch.zeros_like(y_BTD[b, real:]))
    assert_exact(scatter(y_BTD, moved), x_BTD * mask_BT[..., None])
    assert_exact(scatter(torch.full_like(x_BTD, torch.nan), moved)[~mask_BT], torch.zeros_like(x_BTD[~mask_BT]))


def test_real_slots_and_zero_padding_count_from_the_front():
    lengths_B = torch.tensor([2, 0, 3])
    expected = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    assert_exact(real_slots(lengths_B, 3), expected)
    assert_exact(zero_padding(torch.ones(3, 3, 2), lengths_B), expected[..., None].expand(3, 3, 2).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_mask_that_is_not_bool_is_refused(dtype):
    check_mask(torch.ones(2, 5, dtype=torch.bool), 2, 5)
    with pytest.raises(TypeError, match=f"mask must be a bool tensor .*got {dtype}"):
        check_mask(torch.ones(2, 5, dtype=dtype), 2, 5)


@pytest.mark.parametrize("shape", [(2, 4), (5, 2), (10,), (2, 5, 1)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 5\), one entry per token, got \("):
        check_mask(torch.ones(shape, dtype=torch.bool), 2, 5)
