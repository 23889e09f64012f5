from subquad.attention.laws import Law
from tests.attention.oracles import SoftmaxContract, agrees


class TestFull(SoftmaxContract):
    name = "full"

    def sees(self, t, s, head):
        return s <= t or not self.options.get("causal", True)


class TestFullWithSharedHeads(TestFull):
    """One head of keys and values, rotary positions and biases: they change the cache and depend on positions."""

    name = "full"
    options = {"num_kv_heads": 1, "rope": True, "bias": True}
    laws = (Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS)


class TestFullWithAnOutputGate(TestFull):
    """Shared heads, partly rotated: the layout of Qwen3-Next."""

    name = "full"
    options = {"output_gate": True, "num_kv_heads": 1, "rope": True, "rope_fraction": 0.5}
    laws = (
        Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.PRECISION, Law.DOCUMENTS, Law.IN_PLACE,
        Law.RANKS,
    )  # fmt: skip


class TestFullBidirectional(TestFull):
    name = "full"
    options = {"causal": False, "rope": True}


def test_the_oracle_agrees_with_heads_of_another_width():
    agrees(TestFull, head_dim=6, output_gate=True, qkv_bias=True)
