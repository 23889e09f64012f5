from subquad.testing import AttentionContract


class TestWindow(AttentionContract):
    name = "window"
    options = {"width": 11}


class TestWindowOfSharedHeads(AttentionContract):
    """One head of keys and values, rotary positions: they change the cache and depend on positions."""

    name = "window"
    options = {"width": 11, "num_kv_heads": 1, "rope": True}
    laws = (2, 3, 4, 8, 15)


class TestWindowBidirectional(AttentionContract):
    """An even width: one more token before the query than after it."""

    name = "window"
    options = {"width": 12, "causal": False}
