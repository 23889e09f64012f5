import torch

from subquad.attention import build
from subquad.attention.laws import Law
from subquad.testing import AttentionContract
from tests.attention.oracles import attend, projected, standardised


class TestLlpPrinted(AttentionContract):
    """Figure 5: one tensor is key and value; after the first block, which has its own output, keys are normalised."""

    name = "llp_printed"
    options = {"segment": 16}

    def oracle(self, layer, x_TD):
        config = layer.config
        half = config.segment // 2

        def normed(k_TK):
            return standardised(k_TK) * layer.norm.weight + layer.norm.bias if config.key_norm else k_TK

        q, k, v = projected(layer, x_TD, norm=normed)
        first_q, first_k, first_v = projected(layer, x_TD, "first_" if config.first_block_projections else "")
        rows = []
        for t in range(len(x_TD)):
            start = max(0, (t // half - 1) * half)
            of = (first_q, first_k, first_v) if t < half else (q, k, v)
            y_C = torch.cat([attend(a[t], b[start : t + 1], c[start : t + 1]) for a, b, c in zip(*of, strict=True)])
            rows.append((layer.first_out if t < half and config.split_output else layer.out)(y_C))
        return torch.stack(rows)


class TestLlpPrintedByTheEquations(TestLlpPrinted):
    """Equations 22 to 24: the first half segment has projections, and so a cache, of its own."""

    name = "llp_printed"
    options = {
        "segment": 16, "first_block_projections": True, "shared_kv": False, "key_norm": False, "split_output": False,
        "rope": True, "num_kv_heads": 1,
    }  # fmt: skip
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.SAVED, Law.DOCUMENTS, Law.RANKS,
    )  # fmt: skip


def test_an_unfinished_first_block_keeps_its_own_keys_and_values_too():
    options = TestLlpPrintedByTheEquations.options | {"segment": 8, "num_kv_heads": 2}
    sizes = [build("llp_printed", dim=16, num_heads=2, **options).state_bytes(tokens) for tokens in (3, 4)]
    assert sizes == [2 * 2 * 3 * 16 * 4, 2 * 4 * 16 * 4]


def test_the_first_blocks_weights_are_computed_twice_and_allowed_once():
    apart, alike = (build(name, dim=16, num_heads=2, segment=8).cost(20) for name in ("llp_printed", "llp"))
    assert apart.unmasked_entries == alike.unmasked_entries
    assert apart.score_entries == alike.score_entries + 2 * 4 * 4
