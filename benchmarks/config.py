"""Configurations of the benchmarks; they load without torch."""

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
    """Settings that the three benchmarks have in common."""

    lists: ClassVar[tuple[str, ...]]
    """Fields that must be lists."""

    mechanisms: list[str] = field(default_factory=lambda: ["full", "llp", "window", "linear", "latte", "elita"])
    """Causal mechanisms, and for `measure_model` the stack perceiver_ar."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    repeats: int | None = None
    """Timed calls of each case, in turns (None: what fits into `seconds`, at least 5, or 3 where a call takes two)."""
    seconds: float = 20.0
    """Seconds for the repeats of one length, about."""
    batch: int = 1
    """Sequences B."""

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
            raise ValueError("there must be at least one mechanism")
        for item in fields(self):
            _check_counts(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class LengthsConfig(BenchConfig):
    """Settings of measurements at several lengths, beside other libraries."""

    tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Lengths T."""
    batch_tokens: int | None = None
    """Tokens of all sequences together: each length then has as many sequences as make them up."""
    peers: str | list[str] = "auto"
    """auto (those that are installed), none, or names of other libraries."""

    def batch_of(self, tokens: int) -> int:
        """Sequences of a length."""
        return self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(BenchConfig):
    """The decoder that is measured."""

    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of each mechanism by its name."""
    layers: int = 2
    """Layers."""
    dim: int = 128
    """Model width D."""
    heads: int = 2
    """Heads H."""
    vocab: int = 1024
    """Tokens in the vocabulary."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as `build_decoder` takes them."""
        return {"layers": self.layers, "dim": self.dim, "heads": self.heads, "vocab": self.vocab}


@dataclass(frozen=True, kw_only=True)
class OpsConfig(LengthsConfig):
    """Operators alone, without projections: `measure_ops`."""

    lists = ("mechanisms", "tokens", "latents", "segment", "backends", "passes")

    mechanisms: list[str] = field(default_factory=lambda: ["llp", "window", "linear", "latte", "elita"])
    """Mechanisms that have an operator of their own."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    """Lengths T."""
    heads: int = 8
    """Heads H."""
    channels: int = 64
    """Channels of a head."""
    latents: list[int] = field(default_factory=lambda: [64])
    """Latents of a head: several show how latte's time grows with them."""
    segment: list[int] = field(default_factory=lambda: [256])
    """LLP's segment, two halves, and the width of the window; several make several lines."""
    backends: list[str] = field(default_factory=list)
    """Backends of our engines, each a line (none: the one that the engine chooses)."""
    passes: list[str] = field(default_factory=lambda: ["forward", "forward_backward"])
    """forward (without gradients), backward, forward_backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choices("pass", self.passes, PASSES)
        _check_choices("backend", self.backends, BACKENDS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LengthsConfig, DecoderSizes):
    """A decoder: a training step (forward and backward, no optimizer) and prefill: `measure_model`."""

    lists = ("mechanisms", "tokens")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecoderSizes):
    """One decoded token after contexts of several lengths: `measure_decode`."""

    lists = ("mechanisms", "contexts")

    contexts: list[int] = field(default_factory=lambda: [1000, 4000, 16000])
    """Tokens read before the one that is timed."""
    piece: int = 2048
    """Tokens that prefill reads at a time."""


def _check_counts(name: str, value: Any) -> None:
    """Raise `ValueError` for a list that may not be empty and is, and for a whole number below one."""
    values = value if isinstance(value, list) else [value]
    if not values and name not in ("backends", "peers"):
        raise ValueError(f"{name} must have at least one value")
    for number in values:
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _check_choices(what: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise `ValueError` for a value that is not one of the valid ones."""
    for value in values:
        if value not in valid:
            raise ValueError(f"unknown {what} {value!r}; {suggest(value, valid)}")
