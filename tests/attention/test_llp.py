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
