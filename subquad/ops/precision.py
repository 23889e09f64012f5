"""Dtypes of sums and states: float32, or float64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float32, or in float64 if one of them is float64."""
    wide = wide_dtype(*tensors)
    return tuple(x.to(wide) for x in tensors)


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is float64."""
    # Not by `wide_dtype`: each decoding step calls this several times.
    return x if x.dtype == torch.float64 else x.to(torch.float32)
