import math

import pytest
import torch

from subquad.attention import build
from subquad.testing import AttentionContract
from tests.attention.oracles import agrees, attend, heads

SIZES = {"dim": 16, "num_heads": 2}


class TestLinformer(AttentionContract):
    name = "linformer"
    options = {"max_tokens": 32_768, "projected": 6}

    def oracle(self, layer, x_TD):
        """Attention to learned mixtures of the tokens."""
        sharing, rows, T = layer.config.sharing, [], len(x_TD)
        q, k, v = (heads(project(x_TD), self.num_heads) for project in (layer.query, layer.key, layer.value))
        for t in range(T):
            row = []
            for h in range(self.num_heads):
                of = h if sharing == "none" else 0
                e = layer.project_keys[of]
                f = e if sharing == "key_value" else layer.project_values[of]
                row.append(attend(q[h][t], e[:, :T] @ k[h], f[:, :T] @ v[h]))
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_the_oracle_agrees_with_each_sharing(sharing):
    agrees(TestLinformer, sharing=sharing, max_tokens=22)


def test_a_sequence_of_more_slots_than_max_tokens_is_refused():
    layer, x = build("linformer", **SIZES, max_tokens=10), torch.randn(2, 12, 16)
    padded = torch.arange(12).expand(2, 12) < 7
    match = r"this linformer layer reads at most max_tokens=10 tokens, got 12 \(slots of padding count\); cut off"
    for call in (layer.forward, layer.weights):
        call(x[:, :10])
        with pytest.raises(ValueError, match=match):
            call(x)
    with pytest.raises(ValueError, match=match):
        layer(x, mask=padded)
    layer(x[:, :10], mask=padded[:, :10])


@pytest.mark.parametrize(("sharing", "matrices"), [("none", 4), ("heads", 2), ("key_value", 1)])
def test_projections_are_shared_as_asked(sharing, matrices):
    torch.manual_seed(0)
    layer = build("linformer", **SIZES, max_tokens=50, projected=9, sharing=sharing)
    tables = [p for name, p in layer.named_parameters() if name.startswith("project_")]
    assert sum(p.numel() for p in tables) == matrices * 9 * 50
    bound = 1 / math.sqrt(9)
    assert all(bound / 2 < p.abs().max() <= bound for p in tables)
