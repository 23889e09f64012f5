"""What the scans ask of their inputs, and the backend that these can have.

Shape letters: B batch, H heads, T tokens, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops.backends import HAS_TRITON, choose

BACKENDS = ("reference", "torch", "sequential", "triton")
MOST_CHANNELS, MOST_LATENTS = 256, 512
"""What the kernels of `triton` hold of one head."""


def check_inputs(*tensors: tuple[str, Tensor]) -> tuple[int, int, int, int]:
    """B, H, T and the channels of the last tensor; raises where the named tensors do not fit together."""
    for name, x in tensors:
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape [B, H, T, channels], got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.shape[:3] != tensors[0][1].shape[:3]:
            raise ValueError(
                f"{name} must agree with {tensors[0][0]} in B, H and T, "
                f"got {tuple(x.shape)} and {tuple(tensors[0][1].shape)}"
            )
    B, H, T, V = tensors[-1][1].shape
    return B, H, T, V


def choose_for(op: str, backend: str | None, tensors: list[Tensor], sizes: dict[str, tuple[int, int]]) -> str:
    """The backend: without a request `triton` on a GPU where its kernels take dtypes and sizes, else `torch`."""
    fitting = wide_of(*tensors) == torch.float32 and all(size <= most for size, most in sizes.values())
    on_gpu = tensors[0].device.type == "cuda"
    name = choose(op, backend, BACKENDS, "triton" if on_gpu and HAS_TRITON and fitting else "torch")
    if name == "triton" and not HAS_TRITON:
        raise ValueError(f"backend 'triton' of {op} needs the package triton: pip install 'subquad[triton]'")
    for what, (size, most) in sizes.items():
        if name == "triton" and size > most:
            raise ValueError(f"backend 'triton' of {op} holds at most {most} {what} a head, got {size}")
    return name


def chunk_of(chunk_size: int | None, default: int) -> int:
    """The chunk size asked for, or the default."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    return chunk_size or default


def wide_of(*tensors: Tensor) -> torch.dtype:
    """The dtype of the recurrence: float32, or float64 where an input has it."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def masked(tensors: list[Tensor], mask: Tensor | None, dtype: torch.dtype, fills: tuple[float, ...]) -> list[Tensor]:
    """The tensors in this dtype; each holds its fill at padding."""
    wide = [x.to(dtype) for x in tensors]
    if mask is None:
        return wide
    padding = ~mask[:, None, :, None]
    return [x.masked_fill(padding, fill) for x, fill in zip(wide, fills, strict=False)]


def zero_padding(out_BHTV: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros at padding."""
    return out_BHTV if mask is None else out_BHTV.masked_fill(~mask[:, None, :, None], 0.0)
