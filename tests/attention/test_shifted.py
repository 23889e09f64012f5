from subquad.testing import AttentionContract


class TestShifted(AttentionContract):
    name = "shifted"
    options = {"group": 16, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestShiftedAsPublished(AttentionContract):
    """Groups that wrap around leak, so most laws don't apply; the others hold as for the causal form."""

    name = "shifted"
    options = {"group": 16, "wrap": True}
    laws = (1, 2)
    tokens = 64
    fewest_heads = 2
