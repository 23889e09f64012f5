import torch

from subquad.attention import build
from subquad.testing import AttentionContract


class TestLlp(AttentionContract):
    name = "llp"
    options = {"segment": 16}


class TestLlpOfTheEquations(AttentionContract):
    """Equations 22 to 24: the first half segment has its own query, key and value projections."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "first_block_projections": True, "rope": True, "num_kv_heads": 1}


class TestLlpOfThePseudocode(AttentionContract):
    """Figure 5: one tensor is key and value, keys are normalised after the first block, which has its own output."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "shared_kv": True, "key_norm": True, "split_output": True}


def test_an_unfinished_first_block_keeps_its_own_keys_and_values_too():
    layer = build("llp", dim=16, num_heads=2, segment=8, first_block_projections=True)
    sizes = [layer(torch.zeros(1, tokens, 16))[1].nbytes for tokens in range(12)]
    assert sizes == [layer.state_bytes(tokens) for tokens in range(12)]
    assert sizes[3] == 2 * 2 * 3 * 16 * 4
    assert sizes[4] == 2 * 4 * 16 * 4


def test_the_first_blocks_weights_are_computed_twice_and_allowed_once():
    apart, alike = (build("llp", dim=16, num_heads=2, segment=8, key_norm=norm).cost(20) for norm in (True, False))
    assert apart.unmasked_entries == alike.unmasked_entries
    assert apart.score_entries == alike.score_entries + 2 * 4 * 4


class TestLlpWithShiftedHeads(AttentionContract):
    """Half of the heads have boundaries moved by a quarter of a segment."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "shifted_heads": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestLlpBidirectional(AttentionContract):
    """Its half segment and both neighbours."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "causal": False}
