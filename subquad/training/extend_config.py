"""What an extension of a model's reach is, apart from the code that does it: read by the command line without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config
from subquad.data.config import DataConfig
from subquad.training.config import OptimizerConfig, RunConfig
from subquad.training.schedule import ScheduleConfig, at_least

ATTENTION = ("shifted", "llp", "window", "full")
"""What attends in training; `full` is the model's own."""
SPANS = {"shifted": "group", "llp": "segment", "window": "width"}
"""The option of each that says how many tokens attend to each other: a quarter of the length where it is not given."""


@dataclass(frozen=True, kw_only=True)
class FactorsConfig(Config):
    """What trains: low-rank factors in the projections of attention, and by LongLoRA's advice a little more."""

    rank: int = 8
    """Rank r of the factors `W + s B A` in the projections of attention (query, key, value, output)."""
    alpha: int | None = None
    """The factors are scaled by s = alpha / rank (None: twice the rank)."""
    dropout: float = 0.0
    """Dropout of what the factors read, in training."""
    embeddings: bool = True
    """Whether the embeddings of tokens train too, whole, and with them a head that is tied to them."""
    norms: bool = True
    """Whether the weights of all norms train too, whole."""

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)
        if self.alpha is not None:
            at_least("lora.alpha", self.alpha, 1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class LongBatchConfig(Config):
    """Windows in one step, of as many tokens each as the model is extended to."""

    size: int = 1
    """Windows in one forward pass."""
    accumulation: int = 8
    """Forward passes whose gradients are added up for one step."""

    def __post_init__(self) -> None:
        at_least("batch.size", self.size, 1)
        at_least("batch.accumulation", self.accumulation, 1)


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(Config):
    """How the loss by position is measured, before and after."""

    tokens: int = 16384
    """Tokens of the held-out text that are predicted, each of them from every range of positions (about: a multiple of
    the distance of two windows)."""
    stretches: int = 4
    """Places of the held-out text, evenly spread, from which these tokens are taken."""

    def __post_init__(self) -> None:
        at_least("eval.tokens", self.tokens, 1)
        at_least("eval.stretches", self.stretches, 1)


def _run() -> RunConfig:
    return RunConfig(folder="runs/extended", steps=200, eval_every=50, eval_windows=8, save_every=50)


@dataclass(frozen=True, kw_only=True)
class ExtendConfig(Config):
    """A model of transformers with rotary positions that learns to read longer windows, as LongLoRA does."""

    model: str = ""
    """The model to extend: its folder, or its name on the Hugging Face hub."""
    length: int = 16384
    """Tokens that the model shall read afterwards; more than its own max_position_embeddings."""
    rope: Literal["linear", "ntk", "yarn", "dynamic"] = "linear"
    """How positions are scaled by f = length / own length. linear: all frequencies divided by f (position
    interpolation); ntk: the base of the frequencies raised to the power that divides the lowest by f; yarn: low
    frequencies divided, high ones kept; dynamic: as ntk, by the length of each input (frequencies change while a text
    grows, so that cached keys stay behind)."""
    attention: str = "shifted"
    """What attends in training: shifted (LongLoRA's S2, without its leak), llp, window, or full (the model's own)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that attention: group of shifted, segment of llp, width of window, each by default a quarter of
    length."""
    keep_attention: bool = False
    """Whether the extended model keeps attending so; otherwise it attends in full, as the model did."""
    control: bool = False
    """Whether to train a second adapter on the same windows in the same steps, cut into parts of the model's own
    length, and to measure it at length with the same scaling of positions, untrained."""
    lora: FactorsConfig = field(default_factory=FactorsConfig)
    """What trains."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text and its split; the tokenizer is the model's own."""
    batch: LongBatchConfig = field(default_factory=LongBatchConfig)
    """Windows in one step."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-4, weight_decay=0.0))
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="constant", warmup=20))
    """The learning rate over the steps."""
    run: RunConfig = field(default_factory=_run)
    """Folder, steps and reports."""
    eval: PositionsConfig = field(default_factory=PositionsConfig)
    """The report by position."""

    def __post_init__(self) -> None:
        at_least("length", self.length, 4)
        if self.schedule.warmup >= self.run.steps:
            raise ValueError(f"schedule.warmup must be below run.steps={self.run.steps}, got {self.schedule.warmup}")
        for name in ("tokenizer", "vocab_size", "pack"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                raise ValueError(
                    f"data.{name}={getattr(self.data, name)!r} has no effect here: the tokenizer is the model's, and "
                    "windows are cut from the text as it stands; leave it out"
                )
        for name in ("prompt", "sample_tokens", "sample_temperature"):
            if getattr(self.run, name) != getattr(RunConfig(), name):
                raise ValueError(
                    f"run.{name}={getattr(self.run, name)!r} has no effect here: an extension draws no samples; "
                    "leave it out"
                )
        if self.keep_attention and self.attention == "full":
            raise ValueError("keep_attention=true has no effect with attention=full; leave one out")
