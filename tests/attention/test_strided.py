from subquad.testing import AttentionContract


class TestStrided(AttentionContract):
    name = "strided"
    options = {"stride": 8, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestStridedFixed(AttentionContract):
    """Blocks, and the last three tokens of each earlier block: another pattern and cache."""

    name = "strided"
    options = {"stride": 8, "kind": "fixed", "columns": 3}
    laws = (1, 2, 3, 4, 5, 8, 9, 15)
    fewest_heads = 2
