from subquad.testing import AttentionContract


class TestStrided(AttentionContract):
    name = "strided"
    with_inductor = False
    options = {"stride": 8, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestStridedFixed(AttentionContract):
    """Blocks, and the last three tokens of each earlier one."""

    name = "strided"
    with_inductor = False
    options = {"stride": 8, "kind": "fixed", "columns": 3}
    fewest_heads = 2
