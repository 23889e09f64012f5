"""Tokenizers are compared on the same bytes."""

import math

import numpy as np
import pytest

from experiments.llp_table4.experiment import in_bytes


def test_two_tokenizers_with_equal_nats_per_byte_have_equal_bits_in_every_part_of_the_text():
    """300 bytes at half a nat each: as 300 tokens, and as 200 tokens of two bytes and one after a separator."""
    small = in_bytes(np.full(300, 0.5), np.ones(300, dtype=int))
    large = in_bytes(np.array([0.0, *[1.0, 0.5] * 100]), np.array([0, *[2, 1] * 100]))
    assert small["loss"] == 0.5
    assert large["loss"] == pytest.approx(150 / 201)
    assert [row["bits_per_byte"] for row in (small, large)] == pytest.approx([0.5 / math.log(2)] * 2)
    assert small["loss_blocks"] == [0.5] * 100
    assert large["loss_blocks"] == [round(150 / 201, 4)] * 100
    assert small["block_size"] == large["block_size"] == 3


def test_a_part_of_the_text_keeps_its_own_loss():
    """200 bytes in tokens of four and no nats, 200 in tokens of two and one nat each."""
    row = in_bytes(np.array([0.0] * 50 + [1.0] * 100), np.array([4] * 50 + [2] * 100))
    assert row["loss"] == pytest.approx(2 / 3)
    assert row["loss_blocks"] == [0.0] * 50 + [1.3333] * 50  # half a nat per byte, 400 / 150 bytes per token
