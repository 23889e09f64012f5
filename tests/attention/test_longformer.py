from subquad.testing import AttentionContract


class TestLongformer(AttentionContract):
    name = "longformer"
    options = {"width": 9, "num_global": 5, "rope": True, "num_kv_heads": 1}


class TestLongformerBidirectional(AttentionContract):
    name = "longformer"
    options = {"width": 8, "num_global": 3, "causal": False}
