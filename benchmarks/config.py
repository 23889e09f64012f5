"""Configurations of the benchmarks. This module doesn't import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from subquad.config import Config, suggest

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward", "forward_backward")
BACKENDS = ("reference", "torch", "sequential", "flex", "triton")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Settings shared by the three benchmarks."""

    lists: ClassVar[tuple[str, ...]]
    """Fields that must be lists."""

    mechanisms: list[str] = field(default_factory=lambda: ["full", "llp", "window", "linear", "latte", "elita"])
    """Causal mechanisms; `measure_model` also takes the stack perceiver_ar."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    repeats: int | None = None
    """Timed calls of each case (None: as many as fit into `seconds`, at least 5, or 3 if a call takes over 2 s)."""
    seconds: float = 20.0
    """Approximate seconds for the repeats at one length."""
    batch: int = 1
    """Sequences B per batch."""

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; valid: cpu, cuda")
        _check_choices("dtype", [self.dtype], DTYPES)
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        for name in self.lists:
            if not isinstance(getattr(self, name), list):
                raise TypeError(f"{name} must be a list, got {getattr(self, name)!r}")
        if not self.mechanisms:
            raise ValueError("mechanisms must name at least one mechanism")
        for item in fields(self):
            _check_counts(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class LengthsConfig(BenchConfig):
    """Settings of measurements at several lengths beside other libraries."""

    tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Sequence lengths T in tokens."""
    batch_tokens: int | None = None
    """Tokens per batch: each length T gets `batch_tokens // T` sequences (None: `batch` sequences)."""
    peers: str | list[str] = "auto"
    """Other libraries: auto (all that are installed), none, or a list of names."""

    def batch_of(self, tokens: int) -> int:
        """Return the number of sequences of length `tokens`."""
        return self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(BenchConfig):
    """Sizes of the decoder to measure."""

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of mechanisms, by the mechanism's name."""
    layers: int = 2
    """Number of layers."""
    dim: int = 128
    """Model width D."""
    heads: int = 2
    """Number of heads H."""
    vocab: int = 1024
    """Vocabulary size."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes as arguments of `build_decoder`."""
        return {"layers": self.layers, "dim": self.dim, "heads": self.heads, "vocab": self.vocab}


@dataclass(frozen=True, kw_only=True)
class OpsConfig(LengthsConfig):
    """Settings of `measure_ops`: operators without projections."""

    lists = ("mechanisms", "tokens", "latents", "segment", "backends", "passes")

    mechanisms: list[str] = field(default_factory=lambda: ["llp", "window", "linear", "latte", "elita"])
    """Mechanisms from `operators.ENGINES`."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    """Sequence lengths T in tokens."""
    heads: int = 8
    """Number of heads H."""
    channels: int = 64
    """Channels per head."""
    latents: list[int] = field(default_factory=lambda: [64])
    """Latents per head of Latte; each value is timed."""
    segment: list[int] = field(default_factory=lambda: [256])
    """LLP's segment (two halves) and the window's width, in tokens; each value is timed."""
    backends: list[str] = field(default_factory=list)
    """Backends of the engines; each is timed (empty: the engine's own choice)."""
    passes: list[str] = field(default_factory=lambda: ["forward", "forward_backward"])
    """Passes: forward (without gradients), backward, forward_backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choices("pass", self.passes, PASSES)
        _check_choices("backend", self.backends, BACKENDS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LengthsConfig, DecoderSizes):
    """Settings of `measure_model`: training steps (forward and backward, no optimizer) and prefill of decoders."""

    lists = ("mechanisms", "tokens")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecoderSizes):
    """Settings of `measure_decode`: one decoded token after contexts of several lengths."""

    lists = ("mechanisms", "contexts")

    contexts: list[int] = field(default_factory=lambda: [1000, 4000, 16000])
    """Context lengths: tokens read before the timed one."""
    piece: int = 2048
    """Tokens that prefill reads at a time."""


def _check_counts(name: str, value: Any) -> None:
    """Raise `ValueError` for an empty list (except `backends` and `peers`) or an integer below 1."""
    values = value if isinstance(value, list) else [value]
    if not values and name not in ("backends", "peers"):
        raise ValueError(f"{name} must have at least one value")
    for number in values:
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _check_choices(what: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise `ValueError` if a value isn't in `valid`."""
    for value in values:
        if value not in valid:
            raise ValueError(f"unknown {what} {value!r}; {suggest(value, valid)}")
