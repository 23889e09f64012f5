from subquad.testing import AttentionContract


class TestLinear(AttentionContract):
    name = "linear"


class TestLinearAsADistribution(AttentionContract):
    name = "linear"
    options = {"feature_map": "softmax", "eps": 0.0}


class TestLinearBidirectional(AttentionContract):
    name = "linear"
    options = {"causal": False}
