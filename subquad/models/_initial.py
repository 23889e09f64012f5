"""First weights, the same in every model."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import nn


@torch.no_grad()
def initialise(module: nn.Module, std: float, branch_outputs: Container[nn.Module], branches: int) -> None:
    """Normal(std) in linear layers and tables, ones in norms, zero biases; other modules are left as they are.

    The linear layers in `branch_outputs`, which write into a residual stream that `branches` of them write into, are
    `sqrt(branches)` smaller, so that its size does not grow with the depth.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        depth = branches if module in branch_outputs else 1
        nn.init.normal_(module.weight, std=std / math.sqrt(depth))
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        nn.init.ones_(module.weight)
    if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
        nn.init.zeros_(module.bias)
