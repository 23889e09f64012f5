import cmath

import pytest
import torch

from subquad.layers.positions import Embedding, Learned, Sinusoidal, positions, rotate
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths


def test_rotation_is_the_textbook_turn_of_channel_pairs():
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    y = rotate(x, 5)
    for t in range(7):
        for c in range(4):
            pair = torch.complex(x[:, :, t, c], x[:, :, t, c + 4]) * cmath.rect(1, (5 + t) * 10000 ** (-2 * c / 8))
            assert_same_maths(y[:, :, t, c], pair.real)
            assert_same_maths(y[:, :, t, c + 4], pair.imag)


def test_products_of_rotated_vectors_depend_only_on_the_distance():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    here = rotate(q, 9) * rotate(k, 2)
    far = rotate(q, 100_009) * rotate(k, 100_002)
    assert_same_maths(here.sum(), far.sum())
    assert not torch.isclose(here.sum(), (rotate(q, 9) * rotate(k, 3)).sum())


def test_rotation_may_be_cut_anywhere_and_start_elsewhere_in_each_row():
    x = torch.randn(2, 3, 9, 8)
    whole = rotate(x, 0)
    assert_exact(rotate(x[:, :, 4:], 4), whole[:, :, 4:])
    assert_exact(rotate(x[:, :, 4:], torch.tensor([4, 4])), whole[:, :, 4:])
    rows = rotate(x, torch.tensor([3, 0]))
    assert_exact(rows[1], whole[1])
    assert_exact(rows[0], rotate(x[:1], 3)[0])
    assert rotate(x[:, :, :0], 5).shape == (2, 3, 0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_keeps_the_dtype_and_rounds_once(dtype):
    x = torch.randn(1, 2, 4, 8).to(dtype)
    assert_exact(rotate(x, 1000), rotate(x.float(), 1000).to(dtype))


def test_rotation_is_exact_far_into_a_long_sequence():
    x = torch.randn(1, 1, 1, 8)
    exact = rotate(x.double(), 1_000_000)
    assert_in_budget(rotate(x, 1_000_000), exact.float(), exact, torch.float32)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: rotate(torch.randn(1, 1, 2, 7), 0), "even number of channels per head, got 7"),
    (lambda: positions(torch.zeros(1, 2, dtype=torch.long), 2, "cpu"),
     r"integer tensor \[\] or \[B\], got torch.int64 of shape \[1, 2\]"),
    (lambda: rotate(torch.randn(1, 1, 2, 8), torch.zeros(1)), r"integer tensor \[\] or \[B\], got torch.float32"),
    (lambda: Sinusoidal(7), "even dim, got 7"),
    (lambda: Learned(4, max_positions=0), "max_positions must be at least 1, got 0"),
    (lambda: Learned(4, 8)(torch.zeros(2, 3, 4), 6), "position 8 is outside of the learned table of 8 positions"),
    (lambda: Learned(4, 8)(torch.zeros(2, 3, 4), torch.tensor([0, 6])), "position 8 is outside of the learned table"),
])  # fmt: skip
def test_invalid_sizes_and_positions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sinusoidal_encodes_any_position():
    layer = Sinusoidal(8, scale=0.5)
    zeros = torch.zeros(2, 6, 8, dtype=torch.float64)
    whole = layer(zeros, 0)
    assert_exact(whole[0, 0], torch.tensor([0.0] * 4 + [0.5] * 4, dtype=torch.float64))
    assert_same_maths(whole[1, 3, 0], 0.5 * torch.tensor(3.0, dtype=torch.float64).sin())
    assert_same_maths(whole[1, 3, 5], 0.5 * torch.tensor(0.3, dtype=torch.float64).cos())
    assert_exact(layer(zeros[:, 2:], 2), whole[:, 2:])
    assert_exact(layer(zeros, torch.tensor([70_000, 0]))[1], whole[1])
    assert layer(zeros[:, :0], 3).shape == (2, 0, 8)
    assert "scale=0.5" in repr(layer)


def test_learned_looks_up_each_rows_own_positions_and_counts_real_tokens():
    layer = Learned(4, max_positions=8)
    zeros = torch.zeros(2, 3, 4)
    table = layer.table.weight
    assert_exact(layer(zeros, 5)[0], table[5:])
    rows = layer(zeros, torch.tensor([1, 5]))
    assert_exact(rows[0], table[1:4])
    assert_exact(rows[1], table[5:])
    assert layer(zeros[:, :0], 8).shape == (2, 0, 4)
    padded = layer(torch.zeros(2, 10, 4), 0, torch.tensor([8, 2]))
    assert_exact(padded[0, :8], table)
    assert_exact(padded[1, :2], table[:2])


def test_embedding_adds_the_positions_and_drops_out():
    embedding = Embedding(7, 4, position=Learned(4, 5), dropout=0.5)
    tokens = torch.tensor([[3, 1, 6]])
    dropped = embedding(tokens, 2)
    embedding.eval()
    plain = embedding(tokens, 2)
    assert_exact(plain, embedding.tokens.weight[tokens] + embedding.position.table.weight[2:5])
    assert_exact(dropped[dropped != 0], 2 * plain[dropped != 0])
    embedding = Embedding(7, 4)
    assert_exact(embedding(tokens, 100), embedding.tokens.weight[tokens])
