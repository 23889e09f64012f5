"""The subject of the laws: a mechanism with its options, inputs, an oracle, and the message of a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from subquad.attention import Attention, build
from subquad.attention.laws import Law
from subquad.state import State
from subquad.testing.tools import with_gradients


class Judged:
    """The mechanism `name` with `options`, on which the laws are tested."""

    name: ClassVar[str]
    """Registered name of the mechanism."""
    options: ClassVar[dict[str, Any]] = {}
    """Options beside `dim` and `num_heads`."""
    laws: ClassVar[Collection[Law]] = tuple(Law)
    """Laws to test in a quick run. A `conftest.py` may mark the tests of other laws as slow, as subquad's own does."""
    dim: ClassVar[int] = 16
    """Model width D."""
    num_heads: ClassVar[int] = 2
    """Heads H."""
    tokens: ClassVar[int] = 70
    """Tokens T of the short inputs."""
    judged_together: ClassVar[int] = 1
    """Number of inputs in one sample of the precision; more where a gradient of few numbers may be right by chance."""
    fewest_heads: ClassVar[int] = 1
    """Heads for the longest inputs (the law of long inputs)."""
    oracle_tokens: ClassVar[int] = 19
    """Tokens of the sequence that the oracle is compared on."""
    with_inductor: ClassVar[bool] = True
    """Whether the law of compiling is also tested with inductor, which takes seconds; False skips that test."""
    made: tuple[str, ...] = ()
    """Sizes of the inputs that the test has made."""

    def new(self, num_heads: int) -> Attention:
        """Build the mechanism with the options of this class."""
        return build(self.name, dim=self.dim, num_heads=num_heads, **self.options)

    def make(self, dtype: torch.dtype = torch.float64, num_heads: int | None = None) -> Attention:
        """Build the mechanism in `dtype` and evaluation mode, with the same weights at every call."""
        torch.manual_seed(0)
        return self.new(num_heads or self.num_heads).to(dtype).eval()

    @contextmanager
    def judging(
        self, law: Law, dtype: torch.dtype = torch.float64, num_heads: int | None = None
    ) -> Iterator[Attention]:
        """Give `make(dtype, num_heads)` to a test of `law`; raise `SkipTest` with the reason if it is exempt.

        The error of the test says what was compared, the difference, and the limit. A note on it adds the law, the
        mechanism with its options, and the sizes of the inputs.
        """
        layer, self.made = self.make(dtype, num_heads), ()
        if law in layer.exemptions():
            raise SkipTest(f"{layer.name}, law {law.value!r}: {layer.exemptions()[law]}")
        try:
            yield layer
        except SkipTest:
            raise
        except Exception as error:
            config = layer.config
            chosen = [(f.name, getattr(config, f.name)) for f in fields(config) if f.default != getattr(config, f.name)]
            options = ", ".join(f"{name}={value!r}" for name, value in chosen)
            read = f"inputs of D={self.dim}: {'; '.join(self.made)}"
            error.add_note(f"law {law.value!r}: {law.asks}\nbroken by {layer.name}({options}) with {read}")
            raise

    def inputs(self, tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        """Return random inputs `[batch, tokens, dim]`, the same at every call."""
        self.made = tuple(dict.fromkeys((*self.made, f"B={batch}, T={tokens} in {dtype}")))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, tokens, self.dim, dtype=torch.float64, generator=generator).to(dtype)

    def forward_of(self, layer: Attention) -> Callable[[Tensor], Tensor]:
        """Return `layer` as a function from inputs to outputs, without the state."""
        return lambda x: layer(x)[0]

    def exact(self, dtype: torch.dtype, x: Tensor) -> dict[str, Tensor]:
        """Return the definition's output and gradients in float64, for weights and inputs rounded to `dtype`."""
        layer = self.make(dtype).double()
        return with_gradients(layer, layer.definition, x.double())

    def oracle(self, layer: Attention, x_TD: Tensor) -> Tensor:
        """Return the outputs `[T, D]` of one sequence: the paper's equations token by token, in float64.

        The definition and the fast form come from one function, `mix`, and agree on its mistakes. So an oracle shares
        no code with the mechanism: it reads the layer's parameters and options, and has plain loops.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define oracle(self, layer, x_TD): the outputs [T, D] of one sequence by the "
            "paper's equations, token by token, in plain loops over the layer's parameters"
        )

    def state_of(self, layer: Attention, x: Tensor) -> State:
        """Return the state after `x`."""
        return layer(x)[1]
