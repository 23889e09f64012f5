from subquad.testing import AttentionContract


class TestWindow(AttentionContract):
    name = "window"
    options = {"width": 11}


class TestWindowOfSharedHeads(AttentionContract):
    """One head of keys and values, rotary positions."""

    name = "window"
    with_inductor = False
    options = {"width": 11, "num_kv_heads": 1, "rope": True}


class TestWindowBidirectional(AttentionContract):
    """An even width: one token more before the query than after it."""

    name = "window"
    with_inductor = False
    options = {"width": 12, "causal": False}
