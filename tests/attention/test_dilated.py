from subquad.testing import AttentionContract


class TestDilated(AttentionContract):
    name = "dilated"
    options = {"width": 5, "dilation": 3, "rope": True}


class TestDilatedBidirectional(AttentionContract):
    name = "dilated"
    options = {"width": 6, "dilation": 3, "causal": False}
