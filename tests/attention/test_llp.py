from subquad.testing import AttentionContract


class TestLlp(AttentionContract):
    name = "llp"
    options = {"segment": 16}


class TestLlpWithShiftedHeads(AttentionContract):
    """Half of the heads have boundaries moved by a quarter of a segment: another pattern and cache."""

    name = "llp"
    options = {"segment": 16, "shifted_heads": True, "num_kv_heads": 1}
    laws = (1, 2, 3, 4, 5, 8, 9, 15)
    fewest_heads = 2


class TestLlpBidirectional(AttentionContract):
    name = "llp"
    options = {"segment": 16, "causal": False}
