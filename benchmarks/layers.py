"""Measure whole attention layers, with their projections, beside full attention in one process."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from benchmarks.config import LayersConfig
from benchmarks.measuring import Running, by_length, check_there
from benchmarks.models import check_models
from benchmarks.operators import Case, Operator, Shape
from benchmarks.ops import rows_of_length
from benchmarks.report import Report
from subquad.attention import build

BASE = "full"


def check_layers(config: LayersConfig) -> None:
    """Raise `ValueError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, {}, stacks=False)


def measure_layers(config: LayersConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure time and peak memory of layers `build(name, dim=..., num_heads=...)` with their default options.

    The backward pass gives the gradients of the input and of every weight. Ratios are relative to `full`; arguments,
    interleaving and the treatment of failures are as in `measure_ops`.
    """
    config = LayersConfig() if config is None else config
    check_layers(config)
    names = [BASE, *(name for name in config.mechanisms if name != BASE)]
    rows_of = partial(rows_of_length, config.operators, [_case(config.dim, name) for name in names], [])
    return by_length("layers", config, ([], []), rows_of, **running)


def _case(dim: int, name: str) -> Case:
    def make(shape: Shape) -> Operator:
        torch.manual_seed(0)
        layer = build(name, dim=dim, num_heads=shape.heads).to(shape.device, shape.dtype)
        generator = torch.Generator(shape.device).manual_seed(0)
        x_BTD = torch.randn(shape.batch, shape.tokens, dim, generator=generator, device=shape.device).to(shape.dtype)

        def call(*inputs: Tensor) -> Tensor:
            y_BTD: Tensor = layer(inputs[-1])[0]
            return y_BTD

        return Operator([*layer.parameters(), x_BTD.requires_grad_()], call)

    return Case(name, make, lambda _: name, "base" if name == BASE else "ours")
