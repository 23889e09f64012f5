"""Embeddings and positions: rotary (in the mechanisms), sinusoidal and learned (added to the embeddings).

A token's position is the number of real tokens before it. `start` is the position of the first token: an `int`, or a
`[B]` tensor if rows differ. Shape letters: B batch, T tokens, D model width, H heads, K key channels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from subquad.layers.scaling import RopeScaling
from subquad.ops.padding import real_slots
from subquad.ops.precision import wide_dtype
from subquad.tracing import has_values

ROTARY_BASE = 10000.0


def rotate(
    x_BHTK: Tensor,
    start: int | Tensor,
    base: float = ROTARY_BASE,
    /,
    *,
    channels: int | None = None,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """Rotate channels (c, c + K/2) of `x` `[B, H, T, K]` at position p by the angle `p * base ** (-2c / K)`.

    With `channels` R, only the first R channels are rotated (with K = R in the formula). `scaling` changes the
    frequencies and, for yarn, the amplitude.

    The product of a rotated query and a rotated key depends only on the difference of their positions. The result has
    the dtype of `x`; the arithmetic is in float32 or wider. Raises `ValueError` for an odd K, or if `start` is neither
    an int nor an integer tensor `[B]`.
    """
    T, K = x_BHTK.shape[-2:]
    if channels is not None and channels != K:
        turned_BHTR = rotate(x_BHTK[..., :channels], start, base, scaling=scaling)
        return torch.cat((turned_BHTR, x_BHTK[..., channels:]), dim=-1)
    if K % 2:
        raise ValueError(f"rotary positions need an even number of channels per head, got {K}")
    wide = wide_dtype(x_BHTK)
    angles = (start, T, K, base, x_BHTK.device, scaling, wide)
    if T == 1 and type(x_BHTK) is Tensor and isinstance(start, int) and not torch.compiler.is_compiling():
        # In a decoding step all layers rotate queries and keys by the same angles. Tensors made in inference mode
        # cannot be used where gradients are kept, so the mode is part of the key.
        cos_BHTK, sin_BHTK = _kept_cos_sin(*angles, torch.is_inference_mode_enabled())
    else:
        cos_BHTK, sin_BHTK = _cos_sin(*angles)
    x = x_BHTK.to(wide)
    return (x * cos_BHTK + x.roll(K // 2, -1) * sin_BHTK).to(x_BHTK.dtype)


def positions(start: int | Tensor, tokens: int, device: torch.device) -> Tensor:
    """Return the positions of `tokens` tokens from `start` on: `[1, T]` for one number, `[B, T]` for a tensor `[B]`."""
    steps_T = torch.arange(tokens, device=device)
    if isinstance(start, int):
        return (start + steps_T)[None]
    if start.ndim > 1 or start.is_floating_point():
        raise ValueError(
            f"start must be an int or an integer tensor [] or [B], got {start.dtype} of shape {list(start.shape)}"
        )
    return start.to(device).reshape(-1)[:, None] + steps_T


def _angles(
    start: int | Tensor,
    tokens: int,
    channels: int,
    base: float,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """Return angles `[1 or B, T, channels / 2]`, in float64 unless on MPS: float32 is off by 0.004 at 100,000."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    p_BT1 = positions(start, tokens, device)[..., None].to(dtype)
    if scaling is not None:
        return p_BT1 * torch.tensor(scaling.frequencies(channels, base), device=device, dtype=dtype)
    steps = torch.arange(0, channels, 2, device=device, dtype=dtype)
    return p_BT1 * torch.exp(steps * (-math.log(base) / channels))


def _cos_sin(
    start: int | Tensor,
    tokens: int,
    channels: int,
    base: float,
    device: torch.device,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `[1 or B, 1, T, channels]`: the cosines twice, and minus the sines and the sines, times the amplitude."""
    angles_BHTC = _angles(start, tokens, channels, base, device, scaling)[:, None]
    cos_BHTC, sin_BHTC = angles_BHTC.cos().to(dtype), angles_BHTC.sin().to(dtype)
    cos_BHTC, sin_BHTC = torch.cat([cos_BHTC, cos_BHTC], -1), torch.cat([-sin_BHTC, sin_BHTC], -1)
    if scaling is None or scaling.amplitude == 1:
        return cos_BHTC, sin_BHTC
    return cos_BHTC * scaling.amplitude, sin_BHTC * scaling.amplitude


@lru_cache(maxsize=16)
def _kept_cos_sin(*angles_and_inference: Any) -> tuple[Tensor, Tensor]:
    return _cos_sin(*angles_and_inference[:-1])


class Sinusoidal(nn.Module):
    """Add sines (first half of the channels) and cosines (second half) of the angles `p * base ** (-2c / D)`.

    There are no parameters and no largest position. `scale` multiplies the encoding, to match the embeddings' size.
    """

    def __init__(self, dim: int, *, scale: float = 1.0, base: float = ROTARY_BASE) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, got {dim}")
        self.dim, self.scale, self.base = dim, scale, base

    def forward(self, x_BTD: Tensor, start: int | Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Return `x` plus the encodings of the positions from `start` on."""
        angles_BTC = _angles(start, x_BTD.shape[1], self.dim, self.base, x_BTD.device)
        table_BTD = self.scale * torch.cat((angles_BTC.sin(), angles_BTC.cos()), dim=-1)
        return x_BTD + table_BTD.to(x_BTD.dtype)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"dim={self.dim}, scale={self.scale}, base={self.base}"


class Learned(nn.Module):
    """Add row p of a trained table to the token at position p < `max_positions`."""

    def __init__(self, dim: int, max_positions: int) -> None:
        super().__init__()
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        self.table = nn.Embedding(max_positions, dim)

    def forward(self, x_BTD: Tensor, start: int | Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Return `x` plus the table's rows from `start` on; sequence b has `lengths_B[b]` real tokens (None: T).

        Raises `ValueError` for a position outside of the table (in compiled code the embedding itself raises).
        """
        B, T = x_BTD.shape[:2]
        p_BT = positions(start, T, x_BTD.device)
        if lengths_B is not None:
            p_BT = p_BT.expand(B, T).masked_fill(~real_slots(lengths_B, T), 0)
        rows = self.table.num_embeddings
        settled = not has_values(p_BT) or not p_BT.numel() or (isinstance(start, int) and start + T <= rows)
        if not settled and (last := int(p_BT.max())) >= rows:  # reads data, only if shapes don't decide
            raise ValueError(
                f"position {last} is outside of the learned table of {rows} positions (max_positions); "
                "use shorter sequences, a larger table, or rope or sinusoidal positions"
            )
        return x_BTD + self.table(p_BT)


class Embedding(nn.Module):
    """`dropout(scale E[token] + position)`; `position` is None if none are added to the embeddings."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        position: Sinusoidal | Learned | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.tokens = nn.Embedding(vocab_size, dim)
        self.position = position
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor, start: int | Tensor = 0, lengths_B: Tensor | None = None) -> Tensor:
        """Embed `tokens_BT` from position `start` on; row b has `lengths_B[b]` real tokens before padding (None: T).

        Vectors `[B, T, D]` in place of tokens stand for their rows of the table.
        """
        x_BTD = tokens_BT if tokens_BT.is_floating_point() else self.tokens(tokens_BT)
        if self.scale != 1:
            x_BTD = x_BTD * self.scale
        if self.position is not None:
            x_BTD = self.position(x_BTD, start, lengths_B)
        return self.dropout(x_BTD)
