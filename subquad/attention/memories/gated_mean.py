"""The running softmax of one latent, read through a gate against the token itself (ELiTA).

Shape letters: B batch, H heads, T tokens, S tokens that are read, V value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.memories.running_softmax import RunningSoftmax, Tensors, is_future
from subquad.ops import running_softmax
from subquad.ops.softmax import EMPTY, gated_mean


class GatedMean(RunningSoftmax):
    """`read(gate)` gives `g_t mu_t + (1 - g_t) v_t`, `g_t = sigmoid(gate_t + L_t)`.

    mu and L are the mean and the log-normaliser of all tokens up to t; dropout acts on the two shares.
    """

    def read(self, gate_BHT1: Tensor, before: Any, at: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after these tokens."""
        found = gated_mean(gate_BHT1, self.logits, self.v, dropout_p=self.dropout_p, state=before, mask=at.mask)
        return found.out, found.state

    def literal(self, gate_BHT1: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values: the token itself is a second slot, of logit 0."""
        scores_BHTS = self.logits.mT + gate_BHT1
        scores_BHTS = scores_BHTS.masked_fill(is_future(scores_BHTS.shape[-1], scores_BHTS.device), -torch.inf)
        both_BHTS = torch.cat([scores_BHTS, torch.zeros_like(gate_BHT1)], -1).softmax(-1)
        weights_BHTS = both_BHTS[..., :-1] + torch.diag_embed(both_BHTS[..., -1])
        return weights_BHTS.to(self.v.dtype) @ self.v


class GatedEarlier(RunningSoftmax):
    """`read(gate)` gives `g_t mu_{t-1} + (1 - g_t) v_t`, `g_t = sigmoid(gate_t + L_{t-1})`, with mu and L before t.

    Dropout acts on the two shares.
    """

    def read(self, gate_BHT1: Tensor, before: Any, at: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after these tokens."""
        logits, v, dropout_p = self.logits, self.v, self.dropout_p
        found = running_softmax(torch.ones_like(logits), logits, v, state=before, mask=at.mask)
        if before is None:
            before = logits.new_full((*logits.shape[:2], 1), EMPTY), torch.zeros_like(v[:, :, :1])
        lse_BHT1 = found.lse
        lse_BHT1 = torch.cat([before[0][..., None].to(lse_BHT1.dtype), lse_BHT1[:, :, :-1]], 2)
        mean_BHTV = torch.cat([before[1].to(v.dtype), found.out[:, :, :-1]], 2)
        s_BHT1 = gate_BHT1 + lse_BHT1
        shares_BHT2 = F.dropout(torch.cat([s_BHT1.sigmoid(), (-s_BHT1).sigmoid()], -1), dropout_p)
        past_BHT1, own_BHT1 = shares_BHT2.split(1, -1)
        return (past_BHT1 * mean_BHTV + own_BHT1 * v).to(v.dtype), found.state

    def literal(self, gate_BHT1: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values: the diagonal has a logit of its own."""
        T = gate_BHT1.shape[2]
        own_TS = torch.eye(T, dtype=torch.bool, device=gate_BHT1.device)
        scores_BHTS = torch.where(own_TS, -gate_BHT1, self.logits.mT)
        scores_BHTS = scores_BHTS.masked_fill(is_future(T, scores_BHTS.device), -torch.inf)
        return scores_BHTS.softmax(-1).to(self.v.dtype) @ self.v
