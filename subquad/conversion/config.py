"""What a conversion is, apart from the code that does it: read by the command line without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config
from subquad.data.config import DataConfig
from subquad.training.config import BatchConfig
from subquad.training.schedule import at_least

MECHANISMS = ("latte_macchiato", "linear", "llp", "window")
WINDOWED = ("latte_macchiato",)
"""Those whose window is a branch that training can close."""
NEW = {"latte_macchiato": "latents", "linear": "feature maps"}
"""Those that have parameters which full attention has not."""


@dataclass(frozen=True, kw_only=True)
class MatchConfig(Config):
    """Attention transfer: each replaced layer learns the output of the one that it replaces, from the same input."""

    steps: int = 500
    """Optimizer steps."""
    lr: float = 3e-3
    """Peak learning rate of AdamW, reached after a twentieth of the steps; half a cosine down to a tenth follows."""
    train: Literal["attention", "new"] = "attention"
    """attention: all weights of the replaced layers' attention; new: only those that full attention does not have."""
    window_dropout: float | None = None
    """Probability, at the first step, that a layer's window is closed for a step; it falls linearly to 0 at the last
    one (null: 0.5 for latte_macchiato, 0 for the others, which have no such branch)."""

    def __post_init__(self) -> None:
        at_least("match.steps", self.steps, 1)
        _positive("match.lr", self.lr)
        _probability("match.window_dropout", self.window_dropout)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """Low-rank factors in all linear layers but the head, and the new parameters, learn to predict the text."""

    rank: int = 8
    """Rank of the factors, which are merged into the weights at the end."""
    alpha: int | None = None
    """They are scaled by alpha / rank (null: twice the rank)."""
    steps: int = 500
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate of AdamW, on the same schedule."""
    window_dropout: float | None = None
    """As match.window_dropout, in this stage (null: 0.25 for latte_macchiato)."""

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        at_least("lora.steps", self.steps, 1)
        _positive("lora.lr", self.lr)
        _probability("lora.window_dropout", self.window_dropout)
        if self.alpha is not None:
            at_least("lora.alpha", self.alpha, 1)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(Config):
    """What is measured of the original and after each stage."""

    windows: int = 64
    """Held-out windows of batch.length tokens, from the first on (all of them where there are fewer)."""
    passkeys: int = 32
    """Texts of batch.length tokens with a key that is asked for at their end; 0: none."""
    digits: int = 3
    """Digits of a key."""
    contexts: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192])
    """Tokens read before a token is timed and the state is weighed, of the original and of the result."""
    repeats: int = 32
    """Tokens that are timed at each context."""

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("passkeys", 0), ("digits", 1), ("repeats", 1)):
            at_least(f"measure.{name}", getattr(self, name), least)
        for context in self.contexts:
            at_least("measure.contexts", context, 1)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """A conversion: the mechanism, the layers that keep full attention, the text and the two trainings."""

    out: str = "runs/converted"
    """Folder of the result. The same command goes on after the last complete stage."""
    attention: Literal["latte_macchiato", "linear", "llp", "window"] = "llp"
    """The mechanism that takes the place of full attention."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Its options, as --options.llp.segment 64; `subquad list NAME` shows them."""
    keep_every: int = 4
    """Every so many layers one keeps full attention: the last of each group (0: none does)."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text, in the model's own tokens, and the part of it that is held out."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Tokens in one step of both trainings, and in the windows that are measured."""
    match: MatchConfig = field(default_factory=MatchConfig)
    """Attention transfer."""
    lora: TuneConfig = field(default_factory=TuneConfig)
    """Low-rank adaptation of the whole after it."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """What is measured."""
    seed: int = 0
    """Of the new weights, the order of the text and the dropout of windows."""
    threads: int | None = None
    """Threads of PyTorch on the CPU (null: its own choice). Bitwise repetition needs the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where PyTorch finds one; cpu: never."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out must name a folder, got ''")
        if self.keep_every < 0 or self.keep_every == 1:
            raise ValueError(
                "keep_every must be 0 (no layer keeps full attention) or at least 2 (1 would keep all), "
                f"got {self.keep_every}"
            )
        at_least("seed", self.seed, 0)
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        for name in self.options:
            if name != self.attention:
                raise ValueError(f"options.{name} has no effect with attention={self.attention}; leave it out")
        if self.match.train == "new" and self.attention not in NEW:
            raise ValueError(
                f"match.train=new trains nothing: {self.attention} has no parameters that full attention has not; "
                "choose attention"
            )
        for name in ("match", "lora"):
            if getattr(self, name).window_dropout and self.attention not in WINDOWED:
                raise ValueError(
                    f"{name}.window_dropout is for {', '.join(WINDOWED)}: {self.attention} has no branch beside its "
                    "window"
                )
        if self.data.tokenizer != DataConfig().tokenizer or self.data.vocab_size != DataConfig().vocab_size:
            raise ValueError(
                "a conversion reads text by the model's own tokenizer: leave data.tokenizer and data.vocab_size out"
            )

    def window_dropout(self, stage: Literal["match", "lora"]) -> float:
        """The probability at the first step of a stage."""
        chosen: float | None = getattr(self, stage).window_dropout
        usual = {"match": 0.5, "lora": 0.25}[stage] if self.attention in WINDOWED else 0.0
        return usual if chosen is None else chosen


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, got {value}")


def _probability(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
