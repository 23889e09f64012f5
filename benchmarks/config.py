"""What a benchmark measures, as configurations; they load without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from subquad.config import Config, suggest

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward", "forward_backward")
BACKENDS = ("reference", "torch", "sequential", "flex", "triton")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """What the three benchmarks have in common."""

    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    repeats: int | None = None
    """Timed calls of each case, in turns (None: what fits into `seconds`, at least 5, or 3 where a call takes two)."""
    seconds: float = 20.0
    """Seconds for the repeats of one length, about."""

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"unknown device {self.device!r}; valid: cpu, cuda")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; {suggest(self.dtype, DTYPES)}")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class OpsConfig(BenchConfig):
    """Operators alone, without projections: `measure_ops`."""

    mechanisms: list[str] = field(default_factory=lambda: ["llp", "window", "linear", "latte", "elita"])
    """Mechanisms that have an operator of their own."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    """Lengths T."""
    batch: int = 1
    """Sequences B."""
    batch_tokens: int | None = None
    """Tokens of all sequences together: each length then has as many sequences as make them up."""
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
    peers: str | list[str] = "auto"
    """auto (those that are installed), none, or names of other libraries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, "mechanisms", "tokens", "latents", "segment", "backends", "passes")
        check_counts(
            tokens=self.tokens,
            latents=self.latents,
            batch=self.batch,
            heads=self.heads,
            channels=self.channels,
            segment=self.segment,
            batch_tokens=self.batch_tokens,
        )
        check_choices("pass", self.passes, PASSES)
        check_choices("backend", self.backends, BACKENDS)
        if not self.mechanisms or not self.passes:
            raise ValueError("there must be at least one mechanism and one pass")

    def batch_of(self, tokens: int) -> int:
        """Sequences of a length."""
        return self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BenchConfig):
    """A decoder: a training step (forward and backward, no optimizer) and prefill: `measure_model`."""

    mechanisms: list[str] = field(default_factory=lambda: ["full", "llp", "window", "linear", "latte", "elita"])
    """Causal mechanisms, and the stack perceiver_ar."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of each mechanism by its name."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Lengths T."""
    batch: int = 1
    """Sequences B."""
    batch_tokens: int | None = None
    """Tokens of all sequences together: each length then has as many sequences as make them up."""
    layers: int = 2
    """Layers."""
    dim: int = 128
    """Model width D."""
    heads: int = 2
    """Heads H."""
    vocab: int = 1024
    """Tokens in the vocabulary."""
    peers: str | list[str] = "auto"
    """auto (those that are installed), none, or names of other libraries."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, "mechanisms", "tokens")
        check_counts(
            tokens=self.tokens,
            batch=self.batch,
            batch_tokens=self.batch_tokens,
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            vocab=self.vocab,
        )
        if not self.mechanisms:
            raise ValueError("there must be at least one mechanism")

    def batch_of(self, tokens: int) -> int:
        """Sequences of a length."""
        return self.batch if self.batch_tokens is None else max(1, self.batch_tokens // tokens)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(BenchConfig):
    """One decoded token after contexts of several lengths: `measure_decode`."""

    mechanisms: list[str] = field(default_factory=lambda: ["full", "llp", "window", "linear", "latte", "elita"])
    """Causal mechanisms."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of each mechanism by its name."""
    contexts: list[int] = field(default_factory=lambda: [1000, 4000, 16000])
    """Tokens read before the one that is timed."""
    batch: int = 1
    """Sequences that decode together."""
    layers: int = 2
    """Layers."""
    dim: int = 128
    """Model width D."""
    heads: int = 2
    """Heads H."""
    vocab: int = 1024
    """Tokens in the vocabulary."""
    piece: int = 2048
    """Tokens that prefill reads at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(self, "mechanisms", "contexts")
        check_counts(
            contexts=self.contexts,
            batch=self.batch,
            layers=self.layers,
            dim=self.dim,
            heads=self.heads,
            vocab=self.vocab,
            piece=self.piece,
        )
        if not self.mechanisms:
            raise ValueError("there must be at least one mechanism")


def check_lists(config: BenchConfig, *names: str) -> None:
    """Raise `TypeError` for a field that must be a list and is none."""
    for name in names:
        if not isinstance(getattr(config, name), list):
            raise TypeError(f"{name} must be a list, got {getattr(config, name)!r}")


def check_counts(**counts: int | list[int] | None) -> None:
    """Raise `ValueError` for an empty list and for a number below one."""
    for name, value in counts.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if value == []:
            raise ValueError(f"{name} must have at least one number")
        for number in values:
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


def check_choices(what: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise `ValueError` for a value that is not one of the valid ones."""
    for value in values:
        if value not in valid:
            raise ValueError(f"unknown {what} {value!r}; {suggest(value, valid)}")
