"""What the laws of the contract judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from subquad.attention import Attention, build
from subquad.state import State


class ContractOf:
    """What the laws judge: a mechanism with options, and inputs for it."""

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    dim: ClassVar[int] = 16
    num_heads: ClassVar[int] = 2
    tokens: ClassVar[int] = 70
    fewest_heads: ClassVar[int] = 1
    """Heads for the longest inputs."""
    with_inductor: ClassVar[bool] = True
    """Whether law 12 compiles with inductor too, which takes long."""

    def new(self, num_heads: int) -> Attention:
        """A fresh mechanism with the options of this class."""
        return build(self.name, dim=self.dim, num_heads=num_heads, **self.options)

    def make(self, dtype: torch.dtype = torch.float64, num_heads: int | None = None) -> Attention:
        """The mechanism, with the same weights at every call."""
        torch.manual_seed(0)
        return self.new(num_heads or self.num_heads).to(dtype).eval()

    def judged(self, law: int, dtype: torch.dtype = torch.float64, num_heads: int | None = None) -> Attention:
        """`make`, where the class does not exempt itself from the law; else the test is skipped with its reason."""
        layer = self.make(dtype, num_heads)
        if law in layer.exemptions():
            pytest.skip(f"{layer.name}, law {law}: {layer.exemptions()[law]}")
        return layer

    def inputs(self, tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        """Random inputs `[batch, tokens, dim]`, the same at every call."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, tokens, self.dim, dtype=torch.float64, generator=generator).to(dtype)

    def forward_of(self, layer: Attention) -> Callable[[Tensor], Tensor]:
        """`layer`'s outputs alone."""
        return lambda x: layer(x)[0]

    def state_of(self, layer: Attention, x: Tensor) -> State:
        """The state after `x`."""
        return layer(x)[1]
