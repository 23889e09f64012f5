"""Configurations of the benchmarks. This module doesn't import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from subquad.config import Config, suggest

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward", "forward_backward")
BACKENDS = ("reference", "torch", "sequential", "flex", "triton")
CHOSEN = ("full", "llp", "window", "linear", "latte", "elita")
DELTAS = ("delta_net", "gated_delta_net", "kda")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Settings shared by the benchmarks."""

    lists: ClassVar[tuple[str, ...]]
    """Fields that must be lists."""

    mechanisms: list[str] = field(default_factory=lambda: [*CHOSEN])
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
    layers: int = 4
    """Number of layers."""
    dim: int = 192
    """Model width D."""
    heads: int = 3
    """Number of heads H."""
    vocab: int = 4096
    """Vocabulary size."""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes as arguments of `build_decoder`."""
        return {"layers": self.layers, "dim": self.dim, "heads": self.heads, "vocab": self.vocab}


@dataclass(frozen=True, kw_only=True)
class OpsConfig(LengthsConfig):
    """Settings of `measure_ops`: operators without projections."""

    lists = ("mechanisms", "tokens", "latents", "segment", "backends", "passes")

    mechanisms: list[str] = field(default_factory=lambda: [*CHOSEN[1:], "retnet", "mamba2", "gla", *DELTAS])
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
    limit: float = 120.0
    """Seconds. A pass that would take longer, by the square of the tokens from a length before, is skipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choices("pass", self.passes, PASSES)
        _check_choices("backend", self.backends, BACKENDS)
        if not self.limit > 0:
            raise ValueError(f"limit must be above 0, got {self.limit}")


def _causal() -> list[str]:
    from subquad.attention import mechanism, names  # loads torch

    return [name for name in names() if "causal" in mechanism(name).forms and name != "full"]


@dataclass(frozen=True, kw_only=True)
class LayersConfig(BenchConfig):
    """Settings of `measure_layers`: whole attention layers with their projections, beside `full`."""

    lists = ("mechanisms", "tokens")

    mechanisms: list[str] = field(default_factory=_causal)
    """Causal mechanisms."""
    tokens: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    """Sequence lengths T in tokens."""
    dim: int = 512
    """Model width D."""
    heads: int = 8
    """Number of heads H."""
    limit: float = 120.0
    """Seconds. A pass that would take longer, by the square of the tokens from a length before, is skipped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}")

    @property
    def operators(self) -> OpsConfig:
        """Return the sizes as those of operators."""
        same = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "dim"}
        return OpsConfig(channels=self.dim // self.heads, peers="none", **same)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LengthsConfig, DecoderSizes):
    """Settings of `measure_model`: training steps (forward and backward, no optimizer) and prefill of decoders."""

    lists = ("mechanisms", "tokens")

    tokens: list[int] = field(default_factory=lambda: [2048, 8192])
    """Sequence lengths T in tokens."""
    batch: int = 2
    """Sequences B per batch."""
    dtype: str = "bfloat16"
    """float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecoderSizes):
    """Settings of `measure_decode`: one decoded token after contexts of several lengths."""

    lists = ("mechanisms", "contexts")

    mechanisms: list[str] = field(default_factory=lambda: [*CHOSEN, "gla", "mamba2", *DELTAS[1:]])
    """Causal mechanisms."""
    contexts: list[int] = field(default_factory=lambda: [64, 4096, 32768])
    """Context lengths: tokens read before the timed one."""
    peers: str | list[str] = "auto"
    """Other libraries: auto (all that are installed), none, or a list of names."""
    compile: bool = False
    """Whether to time the compiled step too."""
    graph: bool = False
    """Whether to time the step replayed from a CUDA graph too."""
    piece: int = 2048
    """Tokens that prefill reads at a time."""


def _all_causal() -> list[str]:
    return ["full", *_causal()]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(BenchConfig):
    """Settings of `measure_precision`: errors of states and weights in fewer bits."""

    lists = ("mechanisms", "contexts")

    mechanisms: list[str] = field(default_factory=_all_causal)
    """Causal mechanisms."""
    contexts: list[int] = field(default_factory=lambda: [64, 256, 1024, 4096, 8192])
    """Lengths of text, in bytes, after which errors are measured."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of mechanisms, by the mechanism's name."""
    layers: int = 2
    """Number of layers."""
    dim: int = 128
    """Model width D."""
    heads: int = 2
    """Number of heads H."""
    batch: int = 2
    """Held-out texts."""
    data: str = "stdlib"
    """Text to train on and to hold out, as `subquad train --data.path` reads it."""
    steps: int = 160
    """Training steps of each model."""
    train_tokens: int = 512
    """Length of the training texts, in bytes."""
    train_batch: int = 4
    """Texts of a training step."""
    rate: float = 3e-3
    """Largest learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_own_dtypes(self.dtype)
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")


SIZES = {
    "1M": {"layers": 2, "dim": 128, "heads": 2, "vocab": 2048},
    "20M": {"layers": 8, "dim": 384, "heads": 6, "vocab": 16384},
    "100M": {"layers": 12, "dim": 768, "heads": 12, "vocab": 32768},
}
"""Sizes of decoders, by their number of parameters."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSpeedConfig(BenchConfig):
    """Settings of `measure_precision_speed`: tokens/s of weights in fewer bits."""

    lists = ("mechanisms", "sizes")

    mechanisms: list[str] = field(default_factory=lambda: ["gated_delta_net", "latte", "window"])
    """Causal mechanisms."""
    sizes: list[str] = field(default_factory=lambda: ["20M", "100M"])
    """Parameters of the decoders, about: 1M, 20M or 100M."""
    threads: int = 1
    """Threads of PyTorch."""
    seconds: float = 12.0
    """Approximate seconds for the repeats of one mechanism in one size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choices("size", self.sizes, list(SIZES))
        _check_own_dtypes(self.dtype)


def _check_own_dtypes(dtype: str) -> None:
    if dtype != "float32":
        raise ValueError(f"this benchmark measures each dtype beside float32, got dtype {dtype!r}: leave it out")


def _check_counts(name: str, value: Any) -> None:
    """Raise `ValueError` for an empty list (except `backends` and `peers`) or an integer below 1."""
    values = value if isinstance(value, list) else [value]
    if not values and name not in ("backends", "peers"):
        raise ValueError(f"{name} must have at least one value")
    for number in values:
        if isinstance(number, int) and not isinstance(number, bool) and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _check_choices(what: str, values: Sequence[str], valid: Sequence[str]) -> None:
    """Raise `ValueError` if a value isn't in `valid`."""
    for value in values:
        if value not in valid:
            raise ValueError(f"unknown {what} {value!r}; {suggest(value, valid)}")
