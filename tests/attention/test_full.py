from subquad.testing import AttentionContract


class TestFull(AttentionContract):
    name = "full"


class TestFullWithSharedHeads(AttentionContract):
    """Grouped keys and values, rotary positions, biases."""

    name = "full"
    options = {"num_kv_heads": 1, "rope": True, "bias": True}


class TestFullBidirectional(AttentionContract):
    name = "full"
    options = {"causal": False, "rope": True}
