"""Configurations of extensions and of conversions, apart from what runs them: they load no transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config, check_at_least, check_fraction, check_positive
from subquad.data.config import DataConfig
from subquad.training.config import BatchConfig, OptimizerConfig, RunConfig
from subquad.training.schedule import ScheduleConfig

ATTENTION = ("shifted", "llp", "window", "full")
"""What attends in training; `full` is the model's own."""
SPANS = {"shifted": "group", "llp": "segment", "window": "width"}
"""The option of each that says how many tokens attend to each other: a quarter of the length where it is not given."""


@dataclass(frozen=True, kw_only=True)
class FactorsConfig(Config):
    """The weights that train: low-rank factors in the projections of attention, embeddings and norms."""

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
        self.check_least("lora", rank=1, alpha=1)
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
        self.check_least("batch", size=1, accumulation=1)


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(Config):
    """The measurement of the loss by position, before and after."""

    tokens: int = 16384
    """Tokens of the held-out text that are predicted, each of them from every range of positions (about: a multiple of
    the distance of two windows)."""
    stretches: int = 4
    """Places of the held-out text, evenly spread, from which these tokens are taken."""

    def __post_init__(self) -> None:
        self.check_least("eval", tokens=1, stretches=1)


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
        self.check_least(length=4)
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


WINDOWED = ("latte_macchiato",)
"""Mechanisms whose window is a branch that training can close."""
NEW = ("latte_macchiato", "linear")
"""Mechanisms with parameters that full attention lacks."""


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
        self.check_least("match", steps=1)
        check_positive("match.", lr=self.lr)
        check_fraction("match.", window_dropout=self.window_dropout)


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
        self.check_least("lora", rank=1, steps=1, alpha=1)
        check_positive("lora.", lr=self.lr)
        check_fraction("lora.", window_dropout=self.window_dropout)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(Config):
    """The measurements of the original and after each stage."""

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
        self.check_least("measure", windows=1, passkeys=0, digits=1, repeats=1)
        for context in self.contexts:
            check_at_least(1, "measure.", contexts=context)


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
        self.check_least(seed=0, threads=1)
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
        """Return the probability at the first step of a stage."""
        chosen: float | None = getattr(self, stage).window_dropout
        usual = {"match": 0.5, "lora": 0.25}[stage] if self.attention in WINDOWED else 0.0
        return usual if chosen is None else chosen
