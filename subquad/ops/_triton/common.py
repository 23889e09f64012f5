"""Shared parts of the Triton kernels: supported devices, tile sizes, strides, launches.

Tiles have at least 16 rows and columns, the least that tensor cores multiply; channels, latents and tokens beyond the
real ones are masked, so any sizes work.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if kernels run in Triton's interpreter, on a CPU: fixed when a kernel is decorated, by the environment."""
LEAST_TILE = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Card(NamedTuple):
    """What a GPU offers: its compute capability (major, minor), and bytes of shared memory for one block."""

    capability: tuple[int, int]
    shared: int


HOPPER = Card((9, 0), 227 * 1024)
"""An H100 or H200, whose limits the interpreter takes."""


def card(device: torch.device) -> Card:
    """Return what a device offers."""
    if device.type != "cuda":
        return HOPPER
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)  # ROCm has only the latter
    return Card((found.major, found.minor), shared)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; for the interpreter, an H100's number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def float32_products() -> str:
    """Return the precision of products of float32, that of torch's own on a GPU: "ieee", or "tf32" on tensor cores.

    `torch.set_float32_matmul_precision` chooses; its getter raises where the newer setting, read here, was used.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def tile(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 16."""
    return max(LEAST_TILE, 1 << max(0, size - 1).bit_length())


def check_device(op: str, *tensors: Tensor | None) -> None:
    """Raise `ValueError` if the kernels cannot run on these tensors."""
    for x in (x for x in tensors if x is not None):
        if x.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"backend 'triton' of {op} computes in {names}, got {x.dtype}")
        if x.device.type != "cuda" and not (INTERPRETED and x.device.type == "cpu"):
            raise ValueError(
                f"backend 'triton' of {op} needs tensors on a CUDA device (or TRITON_INTERPRET=1 in the environment, "
                f"set before Python starts, to run its interpreter on a CPU), got {x.device}"
            )


def rows(x_BHTL: Tensor) -> Tensor:
    """Return the tensor with the channels of a token side by side, copied if need be."""
    # Kernels take the other strides as they are, so heads need no copy; a row must be one contiguous load.
    return x_BHTL if x_BHTL.shape[-1] == 1 or x_BHTL.stride(-1) == 1 else x_BHTL.contiguous()


def strides(*tensors: Tensor | None, dims: int = 3) -> list[int]:
    """Return the strides of batch, head and token of each tensor in turn; zeros for None."""
    return [s for x in tensors for s in ((0,) * dims if x is None else x.stride()[:dims])]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of the first tensor; an empty grid launches nothing."""
    if 0 in grid:
        return
    first = next(x for x in arguments if isinstance(x, Tensor))
    with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)
