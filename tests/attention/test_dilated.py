from subquad.testing import AttentionContract


class TestDilated(AttentionContract):
    name = "dilated"
    with_inductor = False
    options = {"width": 5, "dilation": 3, "rope": True}


class TestDilatedBidirectional(AttentionContract):
    name = "dilated"
    with_inductor = False
    options = {"width": 6, "dilation": 3, "causal": False}
