import torch

from subquad.attention import build
from subquad.attention.laws import Law
from tests.attention.oracles import SoftmaxContract, agrees


class TestLlp(SoftmaxContract):
    name = "llp"
    options = {"segment": 16}

    def sees(self, t, s, head):
        half = self.options["segment"] // 2
        if not self.options.get("causal", True):
            return abs(s // half - t // half) <= 1
        moved = half // 2 if self.options.get("shifted_heads") and self.is_moved(head) else 0
        near = (s + moved) // half >= (t + moved) // half - 1
        return s <= t and (near or s < self.options.get("sinks", 0))


class TestLlpWithShiftedHeads(TestLlp):
    """Half of the heads have boundaries moved by a quarter of a segment: another pattern and cache."""

    name = "llp"
    options = {"segment": 16, "shifted_heads": True, "num_kv_heads": 1}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS,
    )  # fmt: skip
    fewest_heads = 2


class TestLlpBidirectional(TestLlp):
    name = "llp"
    options = {"segment": 16, "causal": False}


class TestLlpWithSinks(TestLlp):
    """More first tokens than a half segment, which end inside one."""

    name = "llp"
    options = {"segment": 8, "sinks": 5}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.SAVED, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS,
    )  # fmt: skip


class TestLlpWithSinksOfEachKind(TestLlp):
    """Half of the heads have other boundaries, so that other first tokens are near."""

    name = "llp"
    options = {"segment": 8, "shifted_heads": True, "sinks": 5, "learned_sink": True, "num_kv_heads": 1, "rope": True}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.PRECISION, Law.SAVED, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS,
    )  # fmt: skip
    fewest_heads = 2

    def new(self, num_heads):
        layer = super().new(num_heads)
        torch.nn.init.normal_(layer.sink_logits)  # at zero its sign would not count
        return layer


def test_a_row_has_weights_on_its_segments_and_on_the_first_tokens():
    layer = build("llp", dim=16, num_heads=2, segment=4, shifted_heads=True, sinks=3)
    seen = layer.weights(torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0)))[0] > 0
    rows = [
        {3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 6: [0, 1, 2, 4, 5, 6], 8: [0, 1, 2, 6, 7, 8]},
        {2: [0, 1, 2], 3: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4, 5], 7: [0, 1, 2, 5, 6, 7]},  # blocks 0, 1-2, 3-4, 5-6, 7-8
    ]
    for head, expected in enumerate(rows):
        for row, columns in expected.items():
            assert seen[head, row].nonzero().flatten().tolist() == columns, (head, row)


def test_of_three_heads_the_last_is_moved():
    agrees(TestLlpWithShiftedHeads, num_heads=3, bias=True)
