"""Shared by the Triton kernels: where they can run, tile sizes, launching.

A kernel's tiles hold at least 16 rows and columns, as tensor cores want; channels, latents and tokens beyond the real
ones are masked, so any sizes fit.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on a CPU: fixed when a kernel is decorated, so by the environment."""
LEAST_TILE = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tile(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 16."""
    return max(LEAST_TILE, 1 << max(0, size - 1).bit_length())


def check_device(op: str, *tensors: Tensor) -> None:
    """Raise `ValueError` where the kernels cannot run on these tensors."""
    for x in tensors:
        if x.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"backend 'triton' of {op} computes in {names}, got {x.dtype}")
        if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
            raise ValueError(
                f"backend 'triton' of {op} needs tensors on a CUDA device (or TRITON_INTERPRET=1 in the environment, "
                f"set before Python starts, to run its interpreter on a CPU), got {x.device}"
            )


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of the first tensor. An empty grid launches nothing."""
    if 0 in grid:
        return
    first = next(x for x in arguments if isinstance(x, Tensor))
    if first.device.type == "cuda":
        with torch.cuda.device(first.device):
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)
