from subquad.testing import AttentionContract


class TestBigbird(AttentionContract):
    name = "bigbird"
    options = {"block": 8, "num_global": 1, "num_random": 2, "rope": True, "num_kv_heads": 1}


class TestBigbirdBidirectional(AttentionContract):
    name = "bigbird"
    options = {"block": 8, "num_global": 1, "num_random": 2, "causal": False, "seed": 3}
