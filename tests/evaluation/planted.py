"""Small language models with one fault each, which an audit must find and name.

Shape letters: B batch, T tokens, S keys, D width, H heads, K channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention import build
from subquad.evaluation.audit import Adapter

VOCABULARY, DIM = 31, 16


class Planted(nn.Module):
    """Embeddings, one mixer in a residual branch, a head; logits `[B, T, V]`. Right until a subclass makes it wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT)
        return self.head(self.norm(x_BTD + self.out(self.mix(x_BTD))))

    def mix(self, x_BTD: Tensor) -> Tensor:
        """Causal softmax attention with one head."""
        return self.attend(x_BTD, torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).tril())

    def attend(self, x_BTD: Tensor, allowed_TS: Tensor) -> Tensor:
        """Softmax over the keys that are allowed."""
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        score_BTS = (q @ k.mT / DIM**0.5).masked_fill(~allowed_TS, -torch.inf)
        return score_BTS.softmax(-1) @ v


def changed(mix: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> type[Planted]:
    """`Planted` with `mix(attention, x_BTD)` in the place of its causal attention."""

    class Changed(Planted):
        def mix(self, x_BTD: Tensor) -> Tensor:
            return mix(super().mix, x_BTD)

    return Changed


def attending(allowed: Callable[[Tensor, Tensor], Tensor]) -> type[Planted]:
    """`Planted` in which token t attends to each token s for which `allowed(t_T1, s_T)`."""

    class Attending(Planted):
        def mix(self, x_BTD: Tensor) -> Tensor:
            s_T = torch.arange(x_BTD.shape[1])
            return self.attend(x_BTD, allowed(s_T[:, None], s_T))

    return Attending


def positions(x_BTD: Tensor) -> Tensor:
    """0, 1, ... `[T, 1]` in the dtype of x."""
    return torch.arange(x_BTD.shape[1]).to(x_BTD.dtype)[:, None]


LengthInPositions = changed(lambda attention, x: attention(x + positions(x) / x.shape[1]))
"""Causal, with positions t / T of a sequence of T tokens, as ELiTA was published."""
BatchMean = changed(lambda attention, x: attention(x - x.mean(0, keepdim=True) / 2))
"""Subtracts the mean over the batch."""
Mixing = changed(lambda attention, x: x - x.mean(0, keepdim=True) / 2 + x.mean(1, keepdim=True))
"""Mixes its batch and leaks."""
Dropping = changed(lambda attention, x: attention(F.dropout(x, 0.1, training=True)))
"""Applies dropout in eval mode too."""
Counting = changed(lambda attention, x: attention(x) / ((positions(x) + 1) - positions(x)))
"""Divides by t + 1 - t, which bfloat16 can't tell from 0 from 256 tokens on."""
Bursting = changed(lambda attention, x: attention(x) / (positions(x) != 9).to(x.dtype))
"""Infinite from 10 tokens on."""
Rounding = changed(lambda attention, x: (attention(x) + x.sum(1, keepdim=True)) - x.sum(1, keepdim=True))
"""Adds and subtracts a sum over all tokens, later ones too: right up to rounding."""
Narrow = changed(lambda attention, x: attention(x).float().to(x.dtype))
"""Rounds to float32 on its way."""
Halved = changed(lambda attention, x: attention(x) * torch.tensor(0.5, dtype=torch.float32))
"""Right: one number of float32 rounds nothing."""
LargeBatch = changed(
    lambda attention, x: attention(x).where((torch.arange(len(x)) != 2)[:, None, None] | (len(x) < 4), torch.nan)
)
"""NaN in row 2 from four rows on."""
UnmaskedLLP = attending(lambda t, s: (s // 6 == t // 6) | (s // 6 == t // 6 - 1))
"""Each half segment of 6 attends to itself and the one before, without the causal mask."""
LateLeak = attending(lambda t, s: (s <= t) | ((t == 3) & (s == len(t) - 1) & (len(t) > 20)))
"""Right below 21 tokens; from there on output 3 sees the last token."""


class Roll(Planted):
    """S2 as LongLoRA publishes it: tokens rolled by half a group, a triangular mask in the rolled order."""

    group = 8

    def mix(self, x_BTD: Tensor) -> Tensor:
        T = x_BTD.shape[1]
        if T % self.group:
            raise ValueError(f"takes whole groups of {self.group} tokens, got {T}")
        t = torch.arange(T)
        causal = (t[:, None] // self.group == t // self.group) & (t[:, None] >= t)
        plain = self.attend(x_BTD, causal)
        rolled = self.attend(x_BTD.roll(-self.group // 2, 1), causal).roll(self.group // 2, 1)
        return torch.cat([plain[..., : DIM // 2], rolled[..., DIM // 2 :]], -1)


class OurRoll(Planted):
    """The same leak by the library's option `wrap`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = build("shifted", dim=DIM, num_heads=2, group=8, wrap=True)

    def mix(self, x_BTD: Tensor) -> Tensor:
        return self.layer(x_BTD)[0]


class GlobalMaxPerformer(Planted):
    """Positive random features, stabilised by the largest key of ALL tokens before an eps is added."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(DIM, 24))

    def mix(self, x_BTD: Tensor) -> Tensor:
        q, k = (project(x_BTD) / DIM**0.25 for project in (self.query, self.key))
        u = k @ self.directions - k.square().sum(-1, keepdim=True) / 2
        k_BTR = (u - u.amax(dim=(1, 2), keepdim=True)).exp() + self.eps
        w = q @ self.directions
        q_BTR = (w - w.amax(-1, keepdim=True)).exp() + self.eps
        weight_BTS = (q_BTR @ k_BTR.mT).tril()
        return weight_BTS @ self.value(x_BTD) / weight_BTS.sum(-1, keepdim=True)


class Float64Only(UnmaskedLLP):
    """Leaks, and refuses other weights than float64."""

    def mix(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.dtype != torch.float64:
            raise RuntimeError("float64 only")
        return super().mix(x_BTD)


class Linear(Planted):
    """Linear attention with padding by a mask `[B, T]` and a cache of the sums."""

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None, sums: tuple | None = None) -> tuple:
        x_BTD = self.tokens(tokens_BT)
        real_BT1 = torch.ones_like(x_BTD[..., :1]) if mask is None else mask[..., None].to(x_BTD.dtype)
        q_BTK, k_BTK = (F.elu(project(x_BTD)) + 1 for project in (self.query, self.key))
        s_BTKV = (k_BTK * real_BT1)[..., None] * self.value(x_BTD)[..., None, :]
        s_BTKV, z_BTK = s_BTKV.cumsum(1), self.normaliser(k_BTK, real_BT1).cumsum(1)
        if sums is not None:
            s_BTKV, z_BTK = s_BTKV + sums[0][:, None], z_BTK + sums[1][:, None]
            s_BTKV, z_BTK = self.continued(s_BTKV, z_BTK)
        y_BTV = (q_BTK[..., None, :] @ s_BTKV)[..., 0, :] / ((q_BTK * z_BTK).sum(-1, keepdim=True) + 1e-6)
        return self.head(self.norm(x_BTD + self.out(y_BTV))), (s_BTKV[:, -1], z_BTK[:, -1])

    def normaliser(self, k_BTK: Tensor, real_BT1: Tensor) -> Tensor:
        return k_BTK * real_BT1

    def continued(self, s_BTKV: Tensor, z_BTK: Tensor) -> tuple[Tensor, Tensor]:
        return s_BTKV, z_BTK


class PaddedNormaliser(Linear):
    """The denominator counts padded keys too."""

    def normaliser(self, k_BTK: Tensor, real_BT1: Tensor) -> Tensor:
        return k_BTK


class PaddedByZero(Linear):
    """Ignores the mask where padding is not token 0."""

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None, sums: tuple | None = None) -> tuple:
        return super().forward(tokens_BT, None if mask is None else mask | (tokens_BT != 0), sums)


class PaddedToNan(Linear):
    """NaN in rows with padding, at real tokens as well as at padding."""

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None, sums: tuple | None = None) -> tuple:
        logits_BTV, sums = super().forward(tokens_BT, mask, sums)
        return logits_BTV if mask is None else logits_BTV.masked_fill(self.lost(mask)[..., None], torch.nan), sums

    def lost(self, mask_BT: Tensor) -> Tensor:
        return ~mask_BT.all(1, keepdim=True).expand_as(mask_BT)


class NanAtPadding(PaddedToNan):
    """NaN at padding alone, where it concerns nobody."""

    def lost(self, mask_BT: Tensor) -> Tensor:
        return ~mask_BT


class LastState(Linear):
    """After a cache, every new token reads the state after the last one."""

    def continued(self, s_BTKV: Tensor, z_BTK: Tensor) -> tuple[Tensor, Tensor]:
        return s_BTKV[:, -1:].expand_as(s_BTKV), z_BTK[:, -1:].expand_as(z_BTK)


class LinearAdapter(Adapter):
    """Decode with `Linear`."""

    def no_cache(self, model: nn.Module) -> None:
        return

    def step(self, model: nn.Module, tokens_BT: Tensor, cache: tuple | None, mask_BS: Tensor | None = None) -> tuple:
        mask_BT = None if mask_BS is None else mask_BS[:, -tokens_BT.shape[1] :]
        return model(tokens_BT, mask_BT, cache)


class Masked(Planted):
    """Token 3 is never to be drawn: its logit is always -inf."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT).index_fill(-1, torch.tensor([3]), -torch.inf)


class MaskedLLP(Masked, UnmaskedLLP):
    """Leaks, and token 3 has the logit -inf."""
