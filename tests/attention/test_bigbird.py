import pytest
import torch

from subquad.testing import AttentionContract
from tests.attention.oracles import agrees, attend, projected


class TestBigbird(AttentionContract):
    name = "bigbird"
    options = {"block": 8, "num_global": 1, "num_random": 2, "rope": True, "num_kv_heads": 1}

    def oracle(self, layer, x_TD):
        """The random blocks are the layer's own draws; which blocks these may be is checked."""
        q, k, v = projected(layer, x_TD)
        seen_TS = layer.weights(x_TD[None])[0, 0] > 0
        self.check_blocks(layer.config, seen_TS)
        rows = [[attend(q[h][t], k[h][seen], v[h][seen]) for h in range(len(q))] for t, seen in enumerate(seen_TS)]
        return layer.out(torch.stack([torch.cat(row) for row in rows]))

    def check_blocks(self, config, seen_TS):
        size, causal, T = config.block, config.causal, len(seen_TS)
        blocks = -(-T // size)
        for t in range(T):
            block, seen = t // size, seen_TS[t].nonzero()[:, 0].tolist()
            own = {b for b in range(blocks) if abs(b - block) <= config.back or b < config.num_global}
            candidates = {b for b in range(blocks) if not (causal and b > block)}
            if not causal and block < config.num_global:
                assert seen == [*range(T)], "a global row"
                continue
            own, there = own & candidates, {s // size for s in seen}
            assert own <= there <= candidates
            assert len(there - own) == min(config.num_random, len(candidates - own))
            assert seen == [s for s in range(t + 1 if causal else T) if s // size in there]


class TestBigbirdBidirectional(TestBigbird):
    name = "bigbird"
    options = {"block": 8, "num_global": 1, "num_random": 2, "causal": False, "seed": 3}


@pytest.mark.parametrize("causal", [True, False])
def test_of_many_blocks_some_are_drawn(causal):
    agrees(TestBigbird, block=2, causal=causal, seed=1, bias=True)
