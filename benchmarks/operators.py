"""The operators that are timed: our engines and `scaled_dot_product_attention`, on queries, keys and values.

Shape letters: B batch, H heads, T tokens, K = V channels of a head, L latents of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Run
from subquad.attention import names
from subquad.config import suggest
from subquad.ops import block_attention, gated_scan, running_logsumexp, running_softmax
from subquad.ops.flops import gated_scan_flops, running_softmax_flops
from subquad.ops.patterns import Causal, Pattern, Segments, Window

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "forward_backward")
PRODUCTS = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}
"""FLOPs of a pass over those of the forward: five products where it has two."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one measurement."""

    batch: int
    heads: int
    tokens: int
    channels: int
    latents: int
    segment: int
    """Of LLP: two halves; also the width of the window."""
    device: str
    dtype: torch.dtype

    def normal(self, channels: int, seed: int = 0) -> Tensor:
        """`[B, H, T, channels]`, the same numbers at every call, wanting a gradient."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.batch, self.heads, self.tokens, channels)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype).requires_grad_()

    def qkv(self) -> list[Tensor]:
        """Queries, keys and values."""
        return [self.normal(self.channels, seed) for seed in range(3)]


@dataclass(frozen=True)
class Operator:
    """An operator with its inputs."""

    inputs: list[Tensor]
    call: Callable[..., Tensor]
    context: Callable[[], Any] = nullcontext

    def run(self, which: Pass) -> Run:
        """Return the timed call: forward, with gradients (that of the output is made before), or gradients alone."""
        if which == "forward":
            return Run(lambda _: self._forward())
        gradient = self._gradient()
        if which == "backward":
            return Run(lambda out: torch.autograd.grad(out, self.inputs, gradient), before=self._out)
        return Run(lambda _: torch.autograd.grad(self._out(), self.inputs, gradient))

    def moved_bytes(self, which: Pass) -> int:
        """Bytes that have to be read and written: every input, output and gradient once in each direction."""
        read, written = sum(x.nbytes for x in self.inputs), self._out_nbytes()
        forward, backward = read + written, 2 * read + written
        return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[which]

    def io_bytes(self, which: Pass) -> int:
        """Bytes of inputs and outputs; with gradients those of both as well."""
        return (sum(x.nbytes for x in self.inputs) + self._out_nbytes()) * (1 if which == "forward" else 2)

    def _out(self) -> Tensor:
        with self.context():
            return self.call(*self.inputs)

    @torch.no_grad()
    def _forward(self) -> Tensor:
        with self.context():
            return self.call(*(x.detach() for x in self.inputs))  # FlexAttention on a CPU looks at requires_grad

    def _gradient(self) -> Tensor:
        v = self.inputs[-1]
        return torch.randn(v.shape, generator=torch.Generator(v.device).manual_seed(9), device=v.device).to(v.dtype)

    def _out_nbytes(self) -> int:
        return self.inputs[-1].nbytes  # outputs have the values' shape and dtype, everywhere here


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    """The mechanism, or what a peer is called."""
    make: Callable[[Shape], Operator]
    label: Callable[[Shape], str]
    kind: Literal["base", "ours", "peer"] = "ours"
    backend: str | None = None
    flops: Callable[[Shape], int] | None = None
    """Of the forward pass, all heads and sequences."""
    by_latents: bool = False
    """Whether the number of latents changes it."""
    by_segment: bool = False
    """Whether the segment changes it."""
    passes: tuple[Pass, ...] = PASSES
    """Those that it has."""
    beside: str | None = None
    """Of a peer: the mechanism that it is compared with; it is timed where that one is (None: always)."""


def segments(shape: Shape) -> Pattern:
    """LLP's pattern."""
    return Segments(size=max(1, shape.segment // 2))


def window(shape: Shape) -> Pattern:
    """As many tokens as LLP sees at most."""
    return Window(width=shape.segment)


def pattern_flops(pattern: Callable[[Shape], Pattern]) -> Callable[[Shape], int]:
    """Scores and their product with the values, of the keys that a query may see: masked entries do not count."""

    def count(shape: Shape) -> int:
        chosen, entries = pattern(shape), 0
        for t in range(shape.tokens):
            start, stop = chosen.key_range(t, t + 1)
            entries += min(shape.tokens, shape.tokens if stop is None else stop) - start
        return 4 * shape.batch * shape.heads * shape.channels * entries

    return count


def scan_flops(shape: Shape) -> int:
    """Of the scan in chunks."""
    return shape.batch * shape.heads * gated_scan_flops(shape.tokens, shape.channels, shape.channels, normalise=True)


def latte_flops(shape: Shape) -> int:
    """Of the running softmax in chunks."""
    return shape.batch * shape.heads * running_softmax_flops(shape.tokens, shape.latents, shape.channels)


def elita_flops(shape: Shape) -> int:
    """The same for one latent; the gate is element-wise."""
    return shape.batch * shape.heads * running_softmax_flops(shape.tokens, 1, shape.channels)


def attention(pattern: Callable[[Shape], Pattern]) -> Callable[[Shape, str | None], Operator]:
    """`block_attention` over a pattern."""

    def make(shape: Shape, backend: str | None) -> Operator:
        chosen = pattern(shape)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = block_attention(q, k, v, chosen, backend=backend)
            assert isinstance(out, Tensor)
            return out

        return Operator(shape.qkv(), call)

    return make


def linear(shape: Shape, backend: str | None) -> Operator:
    """The normalised scan of given positive features."""
    q, k, v = shape.qkv()
    q, k = ((F.elu(x.detach()) + 1).requires_grad_() for x in (q, k))
    return Operator([q, k, v], lambda q, k, v: gated_scan(q, k, v, None, normalise=True, eps=1e-6, backend=backend).out)


def latte(shape: Shape, backend: str | None) -> Operator:
    """The running softmax, of given p(l | t)."""
    p, logits, v = shape.normal(shape.latents), shape.normal(shape.latents, 1), shape.normal(shape.channels, 2)
    p = p.detach().softmax(-1).requires_grad_()
    return Operator([p, logits, v], lambda p, logits, v: running_softmax(p, logits, v, backend=backend).out)


def elita(shape: Shape, backend: str | None) -> Operator:
    """The running softmax of one latent, and the gate between it and the token itself."""

    def call(key_BHT1: Tensor, gate_BHT1: Tensor, v_BHTV: Tensor) -> Tensor:
        gate_BHT1 = gate_BHT1 + running_logsumexp(key_BHT1)
        past_BHT1, own_BHT1 = gate_BHT1.sigmoid(), (-gate_BHT1).sigmoid()
        return running_softmax(past_BHT1, key_BHT1, v_BHTV, own=own_BHT1, backend=backend).out

    return Operator([shape.normal(1), shape.normal(1, 1), shape.normal(shape.channels, 2)], call)


@dataclass(frozen=True)
class Engine:
    """A mechanism's call of its engine."""

    make: Callable[[Shape, str | None], Operator]
    label: Callable[[Shape], str]
    flops: Callable[[Shape], int]
    by_latents: bool = False
    by_segment: bool = False


ENGINES: dict[str, Engine] = {
    "full": Engine(attention(lambda _: Causal()), lambda _: "full", pattern_flops(lambda _: Causal())),
    "llp": Engine(attention(segments), lambda s: f"llp, segment {s.segment}", pattern_flops(segments), by_segment=True),
    "window": Engine(attention(window), lambda s: f"window, {s.segment} wide", pattern_flops(window), by_segment=True),
    "linear": Engine(linear, lambda _: "linear", scan_flops),
    "latte": Engine(latte, lambda s: f"latte, {s.latents} latents a head", latte_flops, by_latents=True),
    "elita": Engine(elita, lambda _: "elita", elita_flops),
}
"""The mechanisms whose operator can be timed without projections."""


def sdpa() -> Case:
    """The base of all ratios: causal `scaled_dot_product_attention`, on a GPU in 16 bits its flash kernel."""

    def make(shape: Shape) -> Operator:
        q, k, v = shape.qkv()
        half = shape.device.startswith("cuda") and shape.dtype.itemsize == 2
        return Operator([q, k, v], causal_sdpa, flash if half else nullcontext)

    return Case("sdpa", make, lambda _: "sdpa, causal", "base", flops=pattern_flops(lambda _: Causal()))


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[B, H, T, K]`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash() -> Any:
    """The context in which it has to take the flash kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION])


def our_cases(mechanisms: Sequence[str], backends: Sequence[str | None]) -> list[Case]:
    """A case for each mechanism and backend. Raises `ValueError` for a mechanism without an operator of its own."""
    check_mechanisms(mechanisms)
    return [_case(name, backend) for name in mechanisms for backend in backends]


def check_mechanisms(mechanisms: Sequence[str]) -> None:
    """Raise `ValueError` where one has no operator here."""
    for name in mechanisms:
        if name not in ENGINES:
            hint = "; `python -m benchmarks model` times whole layers of any mechanism" if name in names() else ""
            raise ValueError(f"unknown operator {name!r}; {suggest(name, ENGINES)}{hint}")
    if not mechanisms:
        raise ValueError(f"no mechanism to time; valid: {', '.join(sorted(ENGINES))}")


def _case(name: str, backend: str | None) -> Case:
    engine = ENGINES[name]
    return Case(
        name,
        lambda shape: engine.make(shape, backend),
        lambda shape: engine.label(shape) + (f" [{backend}]" if backend else ""),
        backend=backend,
        flops=engine.flops,
        by_latents=engine.by_latents,
        by_segment=engine.by_segment,
    )
