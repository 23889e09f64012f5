"""Treat padding as absent wherever it stands: move real tokens to the front, and their outputs back.

Shape letters: B batch, T tokens, D channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Compaction(NamedTuple):
    """Source of each slot's token (`order_BT`), destination of each token (`inverse_BT`), real tokens of each row."""

    order_BT: Tensor
    inverse_BT: Tensor
    lengths_B: Tensor


class Lengths(NamedTuple):
    """A mask after compaction: the first `lengths_B` tokens of each row are real. A model compacts once for all layers.
    Later slots must hold finite numbers; these have no effect, and the outputs there are unspecified."""

    lengths_B: Tensor


def compaction(mask_BT: Tensor) -> Compaction:
    """Return the stable order that puts real tokens (True) before padding (False)."""
    order_BT = (~mask_BT).to(torch.uint8).argsort(dim=-1, stable=True)
    return Compaction(order_BT, order_BT.argsort(dim=-1), mask_BT.sum(-1))


def real_slots(lengths_B: Tensor, slots: int) -> Tensor:
    """Return bool `[B, slots]`: True for a compacted slot that holds a real token."""
    return torch.arange(slots, device=lengths_B.device) < lengths_B[:, None]


def compact(x_BTD: Tensor, moved: Compaction) -> Tensor:
    """Move real tokens to the front; padding becomes zero whatever it held (NaN too) and gets zero gradient."""
    x_BTD = x_BTD.gather(1, moved.order_BT[..., None].expand_as(x_BTD))
    return zero_padding(x_BTD, moved.lengths_B)


def scatter(y_BTD: Tensor, moved: Compaction) -> Tensor:
    """Undo `compact`: move every output back to its token's place, with zeros at padding."""
    y_BTD = zero_padding(y_BTD, moved.lengths_B)
    return y_BTD.gather(1, moved.inverse_BT[..., None].expand_as(y_BTD))


def zero_padding(x_BTD: Tensor, lengths_B: Tensor) -> Tensor:
    """Zero the slots after each row's `lengths_B` real tokens."""
    return x_BTD.masked_fill(~real_slots(lengths_B, x_BTD.shape[1])[..., None], 0.0)


def check_mask(mask: Tensor, batch: int, tokens: int) -> None:
    """Raise unless `mask` is a bool tensor `[batch, tokens]`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a bool tensor (True for a real token), got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor (True for a real token), got {mask.dtype}")
    if mask.shape != (batch, tokens):
        raise ValueError(f"mask must have shape {(batch, tokens)}, one entry per token, got {tuple(mask.shape)}")


def check_heads(name: str, x: Tensor) -> None:
    """Raise unless `x` is `[B, H, T, channels]` in floating point."""
    if x.ndim != 4:
        raise ValueError(f"{name} must have shape [B, H, T, channels], got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
