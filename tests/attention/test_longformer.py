import torch

from subquad.testing import AttentionContract
from tests.attention.oracles import attend, projected


class TestLongformer(AttentionContract):
    name = "longformer"
    options = {"width": 9, "num_global": 5, "rope": True, "num_kv_heads": 1}

    def oracle(self, layer, x_TD):
        """A window and global tokens, whose own rows have projections of their own."""
        width, count, causal = layer.config.width, layer.config.num_global, layer.config.causal
        ordinary, own, rows = projected(layer, x_TD), projected(layer, x_TD, "global_"), []
        for t in range(len(x_TD)):
            near = range(t - width + 1, t + 1) if causal else range(t - width // 2, t - width // 2 + width)
            seen = [s for s in range(t + 1 if causal else len(x_TD)) if t < count or s < count or s in near]
            q, k, v = own if t < count else ordinary
            rows.append(torch.cat([attend(q[h][t], k[h][seen], v[h][seen]) for h in range(len(q))]))
        return layer.out(torch.stack(rows))


class TestLongformerBidirectional(TestLongformer):
    name = "longformer"
    options = {"width": 8, "num_global": 3, "causal": False}
