from subquad.testing import AttentionContract


class TestShifted(AttentionContract):
    name = "shifted"
    with_inductor = False
    options = {"group": 16, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestShiftedAsPublished(AttentionContract):
    """The groups wrap around: it leaks, and says so."""

    name = "shifted"
    with_inductor = False
    options = {"group": 16, "wrap": True}
    tokens = 64
    fewest_heads = 2
