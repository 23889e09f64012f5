import math

import pytest
import torch

from subquad.attention.logsparse import Logsparse
from subquad.testing import AttentionContract


class TestLogsparse(AttentionContract):
    name = "logsparse"
    options = {"width": 2, "max_tokens": 150}
    oracle_tokens = 150  # past 128, where the second pattern of powers begins

    def oracle(self, layer, x_TD):
        """The equation in the file's docstring, token by token."""
        K, heads, config = self.dim // self.num_heads, [], layer.config
        seen_at = {*range(config.width)} | {2**j for j in range(20) if config.width <= 2**j < config.max_tokens}
        for h in range(self.num_heads):
            q, k, v = (project(x_TD)[:, h * K : (h + 1) * K] for project in (layer.query, layer.key, layer.value))
            rows = []
            for t in range(len(x_TD)):
                seen = [s for s in range(t + 1) if t - s in seen_at]
                w_S = (k[seen] @ q[t] / math.sqrt(K)).exp()
                rows.append(w_S @ v[seen] / w_S.sum())
            heads.append(torch.stack(rows))
        return layer.out(torch.cat(heads, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"width": 0}, "width must be at least 1, got 0"), ({"max_tokens": 4}, "max_tokens must be at least 16, got 4")],
)
def test_options_must_be_large_enough(options, message):
    with pytest.raises(ValueError, match=message):
        Logsparse(dim=16, num_heads=2, **options)
