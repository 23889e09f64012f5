"""Add an attention mechanism of your own: say which scan it is, and training, decoding and the tests come with it.

    y_t = sum_{s <= t} w_ts v_s / sum_{s <= t} w_ts,    w_ts = f^(t - s) phi(q_t) . phi(k_s),    phi(x) = elu(x) + 1

Run it: python examples/own_mechanism.py
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention import build
from subquad.attention.scanned import ScannedAttention, real_mask, seen_after
from subquad.ops import gated_scan
from subquad.state import State

LOG_DECAY = math.log(0.98)


class Decaying(ScannedAttention):
    """Linear attention whose weights shrink by two percent a token."""

    name = "decaying"
    summary = "every earlier token, recent ones more"
    paper = "an example"

    def __init__(self, config: ScannedAttention.Config) -> None:
        super().__init__(config)
        self.query, self.key = self.projection(config.dim), self.projection(config.dim)

    def features(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi of queries and keys, each [B, H, T, K]."""
        return self.split(F.elu(self.query(x_BTD)) + 1), self.split(F.elu(self.key(x_BTD)) + 1)

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the matrix of weights [B, H, T, T]: the definition, used by tests and pictures only."""
        q_BHTK, k_BHTK = self.features(x_BTD)
        t = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        w_BHTS = (q_BHTK @ k_BHTK.mT * (LOG_DECAY * (t[:, None] - t).clamp(min=0)).exp()).tril()
        return w_BHTS / w_BHTS.sum(-1, keepdim=True)

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Compute the same in linear time, from `state` on; rows hold `lengths_B` real tokens, then padding."""
        q_BHTK, k_BHTK = self.features(x_BTD)
        (B, H, T, _), mask = q_BHTK.shape, real_mask(lengths_B, x_BTD.shape[1])
        log_f = torch.full((B, H, T, 1), LOG_DECAY, device=x_BTD.device, dtype=torch.float32)
        before = None if state is None else state.tensor("sums")
        y = gated_scan(q_BHTK, k_BHTK, self.values(x_BTD), log_f, state=before, normalise=True, mask=mask)
        return self.merge(y.out), State({"seen": seen_after(state, T, lengths_B), "sums": y.state}, self.config_hash)


def main() -> None:
    """Compare the fast form with the definition, whole and cut in two. A test file does this and more in three lines:

    class TestDecaying(subquad.testing.AttentionContract): name = "decaying"
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
