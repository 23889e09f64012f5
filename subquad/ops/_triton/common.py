"""Shared by the Triton kernels: where they can run, tile sizes, launching.

A kernel's tiles hold at least 16 rows and columns, as tensor cores want; channels, latents and tokens beyond the real
ones are masked, so any sizes fit.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
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


def rows(x_BHTL: Tensor) -> Tensor:
    """The tensor with the channels of a token side by side."""
    return x_BHTL if x_BHTL.shape[-1] == 1 or x_BHTL.stride(-1) == 1 else x_BHTL.contiguous()


def strides(*tensors: Tensor | None, dims: int = 3) -> list[int]:
    """Strides of batch, head and token, of one tensor after the other."""
    return [s for x in tensors for s in ((0,) * dims if x is None else x.stride()[:dims])]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of the first tensor. An empty grid launches nothing."""
    if 0 in grid:
        return
    first = next(x for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)
