"""Decoding steps written out by hand with as few calls as the mathematics takes: the floor beside which ours are timed.

Shape letters: B batch, H heads, K channels per head, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.layers.positions import ROTARY_BASE
from subquad.models import Decoder

NORM_EPS, SUM_EPS = 1e-6, 1e-6
FORMS = ("linear", "window")


class ByHand:
    """One step at a time of a decoder of `linear` or `window` attention with the default options, by its own weights.

    The memory is written in place: sums of `linear`, a ring of the last keys and values of `window`. A `window` that
    has read nothing of `seen` tokens attends to zeros in their place, which takes the same time.
    """

    def __init__(self, decoder: Decoder, batch: int, seen: int = 0) -> None:
        config, first = decoder.config, decoder.blocks()[0].attention
        self.form, self.seen, self.heads = first.name, seen, config.num_heads
        norm: Any = decoder.norm
        self.table, self.last_norm = decoder.embedding.tokens.weight.detach(), norm.weight.detach()
        self.layers: list[tuple[Tensor, ...]] = []
        self.memories: list[Tensor] = []
        K, like = config.dim // config.num_heads, self.table
        for block in decoder.blocks():
            mix: Any = block.attention
            feed: Any = block.feedforward
            joined = (mix.query, mix.key, mix.value), (feed.gate, feed.up)
            together = [torch.cat([part.weight for part in parts]).detach() for parts in joined]
            norms = [norm.weight.detach() for norm in (block.attention_norm, block.feedforward_norm)]
            self.layers.append((*norms, *together, mix.out.weight.detach(), feed.down.weight.detach()))
            if self.form == "linear":
                self.memories.append(like.new_zeros(batch * self.heads, K, K + 1))
            else:
                self.memories.append(like.new_zeros(2, batch, self.heads, mix.config.width, K))
        steps = ROTARY_BASE ** (-torch.arange(0, K, 2, dtype=torch.float64, device=like.device) / K)
        self.frequencies_K = torch.cat([steps, steps])
        self.signs_K = torch.ones(K, device=like.device).index_fill_(0, torch.arange(K // 2, device=like.device), -1.0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory."""
        return sum(memory.nbytes for memory in self.memories)

    @torch.no_grad()
    def step(self, token_B1: Tensor) -> Tensor:
        """Read one token and return the logits `[B, V]` of the next."""
        x_BD = F.embedding(token_B1[:, 0], self.table)
        if self.form == "window":
            angles_K = self.frequencies_K * self.seen
            self.cos_K, self.sin_K = angles_K.cos().to(x_BD.dtype), (angles_K.sin() * self.signs_K).to(x_BD.dtype)
        for (norm, feed_norm, qkv, gate_up, out, down), memory in zip(self.layers, self.memories, strict=True):
            z_B3HK = F.linear(_rms(x_BD, norm), qkv).view(len(x_BD), 3, self.heads, -1)
            mixed = self._sums(z_B3HK, memory) if self.form == "linear" else self._ring(z_B3HK, memory)
            x_BD = x_BD + F.linear(mixed, out)
            gate, up = F.linear(_rms(x_BD, feed_norm), gate_up).chunk(2, -1)
            x_BD = x_BD + F.linear(F.silu(gate) * up, down)
        self.seen += 1
        return F.linear(_rms(x_BD, self.last_norm), self.table)

    def _sums(self, z_B3HK: Tensor, sums_NKV: Tensor) -> Tensor:
        """`S <- S + phi(k) (x) [v, 1]`, then `phi(q) S`, its last column the divisor."""
        B, K = len(z_B3HK), z_B3HK.shape[-1]
        features = F.elu(z_B3HK[:, :2]) + 1
        v_BHV = F.pad(z_B3HK[:, 2], (0, 1), value=1.0)
        sums_NKV.baddbmm_(features[:, 1].reshape(-1, K, 1), v_BHV.view(-1, 1, K + 1))
        y_NV = torch.bmm(features[:, 0].reshape(-1, 1, K), sums_NKV).squeeze(1)
        return (y_NV[:, :K] / (y_NV[:, K:] + SUM_EPS)).view(B, -1)

    def _ring(self, z_B3HK: Tensor, ring_2BHWK: Tensor) -> Tensor:
        """Turn query and key, write key and value over the oldest ones, and attend to the ring."""
        turned = z_B3HK[:, :2]
        half = turned.shape[-1] // 2
        turned = torch.addcmul(turned * self.cos_K, turned.roll(half, -1), self.sin_K)
        width = ring_2BHWK.shape[3]
        place, filled = self.seen % width, min(self.seen + 1, width)
        ring_2BHWK[0, :, :, place], ring_2BHWK[1, :, :, place] = turned[:, 1], z_B3HK[:, 2]
        k, v = (ring_2BHWK if filled == width else ring_2BHWK[:, :, :, :filled]).unbind(0)
        return F.scaled_dot_product_attention(turned[:, 0, :, None], k, v).reshape(len(z_B3HK), -1)


def _rms(x_BD: Tensor, weight_D: Tensor) -> Tensor:
    return F.rms_norm(x_BD, weight_D.shape, weight_D, NORM_EPS)
