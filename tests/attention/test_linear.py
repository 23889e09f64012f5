from subquad.testing import AttentionContract


class TestLinear(AttentionContract):
    name = "linear"


class TestLinearAsADistribution(AttentionContract):
    name = "linear"
    with_inductor = False
    options = {"feature_map": "softmax", "eps": 0.0}


class TestLinearBidirectional(AttentionContract):
    name = "linear"
    with_inductor = False
    options = {"causal": False}
