from subquad.testing import AttentionContract


class TestFull(AttentionContract):
    name = "full"


class TestFullWithSharedHeads(AttentionContract):
    """Grouped keys and values, rotary positions, biases."""

    name = "full"
    with_inductor = False
    options = {"num_kv_heads": 1, "rope": True, "bias": True}


class TestFullBidirectional(AttentionContract):
    name = "full"
    with_inductor = False
    options = {"causal": False, "rope": True}
