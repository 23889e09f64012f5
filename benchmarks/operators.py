"""Operators to time: the engines and `scaled_dot_product_attention`, on queries, keys and values.

Shape letters: B batch, H heads, T tokens, K = V channels per head, L latents per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Run
from subquad.attention import names
from subquad.config import suggest
from subquad.ops import block_attention, delta_scan, gated_scan, running_softmax
from subquad.ops.flops import delta_scan_flops, gated_scan_flops, running_softmax_flops
from subquad.ops.patterns import Causal, Pattern, Segments, Window
from subquad.ops.softmax import gated_mean

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "forward_backward")
PRODUCTS = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}
"""FLOPs of each pass relative to forward: the backward pass has five matrix products, the forward pass two."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement."""

    batch: int
    heads: int
    tokens: int
    channels: int
    latents: int
    segment: int
    """LLP's segment (two halves) and the window's width, in tokens."""
    device: str
    dtype: torch.dtype

    def normal(self, channels: int, seed: int = 0) -> Tensor:
        """Draw `[B, H, T, channels]`, the same numbers for the same seed, with `requires_grad`."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.batch, self.heads, self.tokens, channels)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype).requires_grad_()

    def qkv(self) -> list[Tensor]:
        """Draw queries, keys and values."""
        return [self.normal(self.channels, seed) for seed in range(3)]


@dataclass(frozen=True)
class Operator:
    """An operator with its inputs."""

    inputs: list[Tensor]
    call: Callable[..., Tensor]
    context: Callable[[], Any] = nullcontext

    def run(self, which: Pass) -> Run:
        """Return the timed call of a pass. The output's gradient is drawn beforehand."""
        if which == "forward":
            return Run(lambda _: self._forward())
        gradient = self._gradient()
        if which == "backward":
            return Run(lambda out: torch.autograd.grad(out, self.inputs, gradient), before=self._out)
        return Run(lambda _: torch.autograd.grad(self._out(), self.inputs, gradient))

    def moved_bytes(self, which: Pass) -> int:
        """Return the bytes that a pass must move: each input, output and gradient read or written once."""
        read, written = sum(x.nbytes for x in self.inputs), self._out_nbytes()
        forward, backward = read + written, 2 * read + written
        return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[which]

    def io_bytes(self, which: Pass) -> int:
        """Return the bytes of inputs and outputs, doubled by their gradients unless `which` is forward."""
        return (sum(x.nbytes for x in self.inputs) + self._out_nbytes()) * (1 if which == "forward" else 2)

    def _out(self) -> Tensor:
        with self.context():
            return self.call(*self.inputs)

    @torch.no_grad()
    def _forward(self) -> Tensor:
        with self.context():
            return self.call(*(x.detach() for x in self.inputs))  # FlexAttention on a CPU checks requires_grad

    def _gradient(self) -> Tensor:
        v = self.inputs[-1]
        return torch.randn(v.shape, generator=torch.Generator(v.device).manual_seed(9), device=v.device).to(v.dtype)

    def _out_nbytes(self) -> int:
        return self.inputs[-1].nbytes  # all operators here return the values' shape and dtype


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    name: str
    """Name of the mechanism or of the peer's operator."""
    make: Callable[[Shape], Operator]
    label: Callable[[Shape], str]
    kind: Literal["base", "ours", "peer"] = "ours"
    backend: str | None = None
    flops: Callable[[Shape], int] | None = None
    """FLOPs of the forward pass over all heads and sequences."""
    by_latents: bool = False
    """Whether it depends on the number of latents."""
    by_segment: bool = False
    """Whether it depends on the segment."""
    passes: tuple[Pass, ...] = PASSES
    """Supported passes."""
    beside: str | None = None
    """For a peer: the mechanism it is compared with. It is timed only beside that mechanism (None: always)."""


def segments(shape: Shape) -> Pattern:
    """Return LLP's pattern."""
    return Segments(size=max(1, shape.segment // 2))


def window(shape: Shape) -> Pattern:
    """Return a window as wide as LLP's longest reach."""
    return Window(width=shape.segment)


def pattern_flops(pattern: Callable[[Shape], Pattern]) -> Callable[[Shape], int]:
    """Count the FLOPs of scores and their product with the values, without masked entries."""

    def count(shape: Shape) -> int:
        chosen, entries = pattern(shape), 0
        for t in range(shape.tokens):
            start, stop = chosen.key_range(t, t + 1)
            entries += min(shape.tokens, shape.tokens if stop is None else stop) - start
        return 4 * shape.batch * shape.heads * shape.channels * entries

    return count


def scan_flops(shape: Shape) -> int:
    """Count the FLOPs of the chunked scan."""
    return shape.batch * shape.heads * gated_scan_flops(shape.tokens, shape.channels, shape.channels, normalise=True)


def gated_flops(shape: Shape, groups: int | None = None) -> int:
    """Count the FLOPs of the chunked scan with at most one decay a head; heads may share queries and keys in groups."""
    T, C, H = shape.tokens, shape.channels, shape.heads
    return shape.batch * gated_scan_flops(T, C, C, groups=groups or H, heads=H)


def delta_flops(shape: Shape) -> int:
    """Count the FLOPs of the chunked delta scan with at most one decay a head."""
    return shape.batch * shape.heads * delta_scan_flops(shape.tokens, shape.channels, shape.channels)


def latte_flops(shape: Shape) -> int:
    """Count the FLOPs of the chunked running softmax."""
    return shape.batch * shape.heads * running_softmax_flops(shape.tokens, shape.latents, shape.channels)


def elita_flops(shape: Shape) -> int:
    """Count the FLOPs of a running softmax with one latent, without the element-wise gate."""
    return shape.batch * shape.heads * running_softmax_flops(shape.tokens, 1, shape.channels)


def attention(pattern: Callable[[Shape], Pattern]) -> Callable[[Shape, str | None], Operator]:
    """Return the maker of `block_attention` over a pattern."""

    def make(shape: Shape, backend: str | None) -> Operator:
        chosen = pattern(shape)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = block_attention(q, k, v, chosen, backend=backend)
            assert isinstance(out, Tensor)
            return out

        return Operator(shape.qkv(), call)

    return make


def linear(shape: Shape, backend: str | None) -> Operator:
    """Make the normalised scan on positive features."""
    q, k, v = shape.qkv()
    q, k = ((F.elu(x.detach()) + 1).requires_grad_() for x in (q, k))
    return Operator([q, k, v], lambda q, k, v: gated_scan(q, k, v, None, normalise=True, eps=1e-6, backend=backend).out)


def log_decays(shape: Shape, channels: int) -> list[Tensor]:
    """Draw logarithms of decays, log-uniformly from -1 to -0.0001: memories of 1 to 10,000 tokens."""
    uniform = torch.special.ndtr(shape.normal(channels, 4).detach().float())
    return [(-(10.0 ** (-4 * uniform))).to(shape.dtype).requires_grad_()] if channels else []


def decayed(channels: Callable[[Shape], int]) -> Callable[[Shape, str | None], Operator]:
    """Return the maker of a gated scan with so many decays a head."""

    def make(shape: Shape, backend: str | None) -> Operator:
        q, k, v = shape.qkv()
        inputs = [q, k, *log_decays(shape, channels(shape)), v]
        return Operator(inputs, lambda q, k, log_f, v: gated_scan(q, k, v, log_f, backend=backend).out)

    return make


def ssd(shape: Shape, backend: str | None) -> Operator:
    """Make Mamba-2's scan: all heads share queries and keys, and a token is written times its step, which is -log f."""
    q, k, v = shape.qkv()
    q, k = (x[:, :1].detach().clone().requires_grad_() for x in (q, k))
    step = (-log_decays(shape, 1)[0]).detach().requires_grad_()
    return Operator([q, k, step, v], lambda q, k, step, v: gated_scan(q, k, step * v, -step, backend=backend).out)


def delta(channels: Callable[[Shape], int]) -> Callable[[Shape, str | None], Operator]:
    """Return the maker of a delta scan with so many decays a head, for keys of length 1."""

    def make(shape: Shape, backend: str | None) -> Operator:
        q, k, v = shape.qkv()
        q, k = (F.normalize(x.detach(), dim=-1).requires_grad_() for x in (q, k))
        beta = shape.normal(1, 3).detach().sigmoid().requires_grad_()

        def call(q: Tensor, k: Tensor, beta: Tensor, *others: Tensor) -> Tensor:
            *decays, v = others
            return delta_scan(q, k, v, beta, decays[0] if decays else None, backend=backend).out

        return Operator([q, k, beta, *log_decays(shape, channels(shape)), v], call)

    return make


def latte(shape: Shape, backend: str | None) -> Operator:
    """Make the running softmax with given p(l | t)."""
    p, logits, v = shape.normal(shape.latents), shape.normal(shape.latents, 1), shape.normal(shape.channels, 2)
    p = p.detach().softmax(-1).requires_grad_()
    return Operator([p, logits, v], lambda p, logits, v: running_softmax(p, logits, v, backend=backend).out)


def elita(shape: Shape, backend: str | None) -> Operator:
    """Make ELiTA's gated mean."""
    inputs = [shape.normal(1), shape.normal(1, 1), shape.normal(shape.channels, 2)]
    return Operator(inputs, lambda gate, key, v: gated_mean(gate, key, v, backend=backend).out)


@dataclass(frozen=True)
class Engine:
    """A mechanism's operator."""

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
    "latte": Engine(latte, lambda s: f"latte, {s.latents} latents per head", latte_flops, by_latents=True),
    "elita": Engine(elita, lambda _: "elita", elita_flops),
    "retnet": Engine(decayed(lambda _: 1), lambda _: "gated scan, a decay per head", gated_flops),
    "mamba2": Engine(ssd, lambda _: "gated scan, as Mamba-2", partial(gated_flops, groups=1)),
    "gla": Engine(decayed(lambda s: s.channels), lambda _: "gated scan, a decay per channel", gated_flops),
    "delta_net": Engine(delta(lambda _: 0), lambda _: "delta scan", delta_flops),
    "gated_delta_net": Engine(delta(lambda _: 1), lambda _: "delta scan, a decay per head", delta_flops),
    "kda": Engine(delta(lambda s: s.channels), lambda _: "delta scan, a decay per channel", delta_flops),
}
"""Mechanisms whose operator can be timed without projections."""


def sdpa() -> Case:
    """Return the base of all ratios: causal `scaled_dot_product_attention`, on a GPU in 16 bits its flash kernel."""

    def make(shape: Shape) -> Operator:
        q, k, v = shape.qkv()
        half = shape.device.startswith("cuda") and shape.dtype.itemsize == 2
        return Operator([q, k, v], causal_sdpa, flash if half else nullcontext)

    return Case("sdpa", make, lambda _: "sdpa, causal", "base", flops=pattern_flops(lambda _: Causal()))


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally; all tensors are `[B, H, T, K]`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def unfused() -> Case:
    """Return causal attention without fusion, as papers time it: it keeps the whole matrix of weights."""
    return Case("unfused", lambda shape: Operator(shape.qkv(), unfused_attention), lambda _: "unfused, causal", "peer")


def unfused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `softmax(q k^T / sqrt(K)) v` over the past, one product, mask and softmax after another."""
    T = q.shape[2]
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future_TT, -math.inf).softmax(-1) @ v


def flash() -> Any:
    """Return a context that makes `scaled_dot_product_attention` use its flash kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION])


def our_cases(mechanisms: Sequence[str], backends: Sequence[str | None]) -> list[Case]:
    """Return a case for each mechanism and backend. Raises `ValueError` for a mechanism without an operator here."""
    check_mechanisms(mechanisms)
    return [_case(name, backend) for name in mechanisms for backend in backends]


def check_mechanisms(mechanisms: Sequence[str]) -> None:
    """Raise `ValueError` for an unknown operator or an empty list."""
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
