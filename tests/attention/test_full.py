from subquad.testing import AttentionContract


class TestFull(AttentionContract):
    name = "full"


class TestFullWithSharedHeads(AttentionContract):
    """One head of keys and values, rotary positions and biases: they change the cache and depend on positions."""

    name = "full"
    options = {"num_kv_heads": 1, "rope": True, "bias": True}
    laws = (2, 3, 4, 8, 15)


class TestFullBidirectional(AttentionContract):
    name = "full"
    options = {"causal": False, "rope": True}
