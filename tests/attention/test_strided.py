from subquad.attention.laws import Law
from tests.attention.oracles import SoftmaxContract, agrees


class TestStrided(SoftmaxContract):
    name = "strided"
    options = {"stride": 8, "rope": True, "num_kv_heads": 1}
    fewest_heads = 2

    def sees(self, t, s, head):
        stride = self.options["stride"]
        if self.options.get("kind") == "fixed":
            last = s % stride >= stride - self.options["columns"]
            return s <= t and (last if self.is_moved(head) else s // stride == t // stride)
        return s <= t and ((t - s) % stride == 0 if self.is_moved(head) else t - s <= stride)


class TestStridedFixed(TestStrided):
    """Blocks, and the last three tokens of each earlier block: another pattern and cache."""

    name = "strided"
    options = {"stride": 8, "kind": "fixed", "columns": 3}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.DOCUMENTS, Law.RANKS,
    )  # fmt: skip
    fewest_heads = 2


def test_of_three_heads_the_last_is_moved():
    agrees(TestStrided, num_heads=3, bias=True)
    agrees(TestStridedFixed, num_heads=3, bias=True)
