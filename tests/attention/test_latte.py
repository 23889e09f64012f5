from subquad.testing import AttentionContract


class TestLatte(AttentionContract):
    name = "latte"
    options = {"num_latents": 10}
