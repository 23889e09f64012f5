"""Add an attention mechanism of your own: say which scan it is, and training, decoding and the tests come with it.

    y_t = sum_{s <= t} w_ts v_s / sum_{s <= t} w_ts,    w_ts = f^(t - s) phi(q_t) . phi(k_s),    phi(x) = elu(x) + 1

Run it: python examples/own_mechanism.py
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention import Attention, build
from subquad.attention.base import split
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past

LOG_DECAY = math.log(0.98)


class Decaying(Attention):
    """Linear attention whose weights shrink by two percent a token."""

    name = "decaying"
    summary = "every earlier token, recent ones more"
    paper = "an example"

    def __init__(self, config: Attention.Config) -> None:
        super().__init__(config)
        self.query, self.key, self.value, self.out = (nn.Linear(config.dim, config.dim) for _ in range(4))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Keep the decaying sums of keys and values, and read them with the queries."""
        projected = F.elu(self.query(x_BTD)) + 1, F.elu(self.key(x_BTD)) + 1, self.value(x_BTD)
        q_BHTK, k_BHTK, v_BHTV = split(self.config.dim // self.config.num_heads, *projected)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        log_f = torch.full((*q_BHTK.shape[:3], 1), LOG_DECAY, device=x_BTD.device, dtype=wide)
        (sums,) = past.keep(sums=Recurrence(k_BHTK, past.values(v_BHTV), log_f, normalise=True))
        return sums.read(q_BHTK)


def main() -> None:
    """Compare the fast form with the definition, whole and cut in two. A test file does this and more:

    class TestDecaying(subquad.testing.AttentionContract):
        name = "decaying"

        def oracle(self, layer, x_TD):
            ...  # y_t as above, token by token: docs/add-a-mechanism.md has one
    """
    layer, x = build("decaying", dim=32, num_heads=2).double(), torch.randn(1, 100, 32, dtype=torch.float64)
    whole, _ = layer(x)
    first, state = layer(x[:, :60])
    rest, _ = layer(x[:, 60:], state)
    torch.testing.assert_close(whole, layer.definition(x))
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    print(f"equal to its definition, and however it is cut; its state takes {state.nbytes:,} bytes at any length")


if __name__ == "__main__":
    main()
