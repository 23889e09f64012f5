import math

import torch

from subquad.attention import build
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.oracles import heads


class TestLatte(AttentionContract):
    name = "latte"
    options = {"num_latents": 10}

    def oracle(self, layer, x_TD):
        """Equations 5 to 21."""
        H, T, causal = self.num_heads, len(x_TD), layer.config.causal
        q, k, v = (heads(project(x_TD), H) for project in (layer.query, layer.key, layer.value))
        rows = []
        for t in range(T):
            end, row = t + 1 if causal else T, []
            for h in range(H):
                p_L = q[h][t].exp() / q[h][t].exp().sum()
                w_SL = k[h][:end].exp() / k[h][:end].exp().sum(0)
                row.append(sum(p * (w_S @ v[h][:end]) for p, w_S in zip(p_L, w_SL.T, strict=True)))
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestLatteBidirectional(TestLatte):
    name = "latte"
    options = {"num_latents": 10, "causal": False}


@torch.no_grad()
def test_one_latent_is_one_running_softmax():
    layer, x_BTD = build("latte", dim=4, num_heads=1, num_latents=1).double(), torch.randn(1, 5, 4, dtype=torch.float64)
    future_TS = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected_BTS = layer.key(x_BTD).mT.masked_fill(future_TS, -torch.inf).softmax(-1)
    assert_same_maths(layer.weights(x_BTD)[:, 0], expected_BTS)


@torch.no_grad()
def test_scale_divides_queries_and_keys_by_the_root_of_a_heads_size():
    """With 2 heads of 4 channels, logits of 4 and 0 become 2 and 0."""
    layer = build("latte", dim=8, num_heads=2, num_latents=4, scale=True).double()
    layer.query.weight.zero_()
    layer.query.weight[::2] = 0.5
    layer.key.weight.copy_(layer.query.weight)
    x_BTD = torch.ones(1, 2, 8, dtype=torch.float64)
    x_BTD[0, 1] = -1.0
    # p(first latent | second token), and p(second token | first latent); the other latent's logits are all 0.
    p, s = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(4))
    expected = torch.tensor(p * s + (1 - p) / 2, dtype=torch.float64)
    assert_same_maths(layer.weights(x_BTD)[0, :, 1, 1], expected.expand(2))
