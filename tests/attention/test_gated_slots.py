import pytest
import torch
from torch.nn import functional as F

from subquad.attention.gated_slots import GatedSlots
from subquad.testing import AttentionContract


class TestGatedSlots(AttentionContract):
    name = "gated_slots"
    options = {"slots": 6}

    def oracle(self, layer, x_TD):
        """The equations in the file's docstring, token by token."""
        K, M, heads = self.dim // self.num_heads, layer.config.slots, []
        for h in range(self.num_heads):
            q, k, v = (
                F.silu(project(x_TD))[:, h * K : (h + 1) * K] for project in (layer.query, layer.key, layer.value)
            )
            a = layer.gate(x_TD)[:, h * M : (h + 1) * M].sigmoid() ** (1 / 8)
            keys_MK, values_MV, rows = x_TD.new_zeros(M, K), x_TD.new_zeros(M, K), []
            for t in range(len(x_TD)):
                keys_MK = torch.diag(a[t]) @ keys_MK + torch.outer(1 - a[t], k[t])
                values_MV = torch.diag(a[t]) @ values_MV + torch.outer(1 - a[t], v[t])
                rows.append((keys_MK @ q[t]).softmax(0) @ values_MV)
            heads.append(torch.stack(rows))
        y_TD = F.silu(torch.cat(heads, -1))
        rms_T1 = (y_TD.square().mean(-1, keepdim=True) + layer.config.norm_eps).sqrt()
        return layer.out(y_TD / rms_T1 * layer.norm_weight)


def test_slots_are_at_least_one():
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        GatedSlots(dim=16, num_heads=2, slots=0)
