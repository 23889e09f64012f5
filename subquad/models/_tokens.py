"""What every model checks of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(tokens_BT: Tensor, name: str = "tokens") -> None:
    """Raise `ValueError` for another shape than `[B, T]` and `TypeError` for another dtype than int64 and int32."""
    if tokens_BT.ndim != 2:
        raise ValueError(f"{name} must have shape [B, T], got {list(tokens_BT.shape)}")
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {tokens_BT.dtype}")
