from subquad.testing import AttentionContract


class TestLatte(AttentionContract):
    name = "latte"
    options = {"num_latents": 10}


class TestLatteBidirectional(AttentionContract):
    name = "latte"
    options = {"num_latents": 10, "causal": False}
