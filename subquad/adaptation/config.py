"""Configurations of extensions and conversions, in a module that doesn't import transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config, check_at_least, check_fraction, check_positive
from subquad.data.config import DataConfig
from subquad.training.config import BatchConfig, OptimizerConfig, RunConfig
from subquad.training.losses import LossConfig
from subquad.training.schedule import ScheduleConfig

ATTENTION = ("shifted", "llp", "window", "full")
"""Attention during training; `full` is the model's own."""
SPANS = {"shifted": "group", "llp": "segment", "window": "width"}
"""The option of each that sets how many tokens attend to each other; a quarter of the length by default."""


@dataclass(frozen=True, kw_only=True)
class FactorsConfig(Config):
    """Trained weights: low-rank factors in the attention projections, embeddings and norms."""

    rank: int = 8
    """Rank r of the factors `W + s B A` in the query, key, value and output projections."""
    alpha: int | None = None
    """Scale of the factors, s = alpha / rank (None: alpha is twice the rank)."""
    dropout: float = 0.0
    """Dropout on the input of the factors during training."""
    embeddings: bool = True
    """Also train the token embeddings in full, and a head that is tied to them."""
    norms: bool = True
    """Also train the weights of all norms in full."""

    def __post_init__(self) -> None:
        self.check_least("lora", rank=1, alpha=1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class LongBatchConfig(Config):
    """Windows of one step; each has `length` tokens."""

    size: int = 1
    """Windows in one forward pass."""
    accumulation: int = 8
    """Forward passes whose gradients are summed for one step."""

    def __post_init__(self) -> None:
        self.check_least("batch", size=1, accumulation=1)


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(Config):
    """Measurement of the loss by position, before and after training."""

    tokens: int = 16384
    """Held-out tokens to predict, each at every range of positions (rounded to a multiple of the distance between two
    windows)."""
    stretches: int = 4
    """Evenly spaced places in the held-out text from which these tokens are taken."""

    def __post_init__(self) -> None:
        self.check_least("eval", tokens=1, stretches=1)


def _run() -> RunConfig:
    return RunConfig(folder="runs/extended", steps=200, eval_every=50, eval_windows=8, save_every=50)


@dataclass(frozen=True, kw_only=True)
class ExtendConfig(Config):
    """Train a transformers model with rotary positions to read longer windows, as LongLoRA does."""

    model: str = ""
    """Model to extend: a folder, or a name on the Hugging Face hub."""
    length: int = 16384
    """Tokens that the extended model reads; more than its own max_position_embeddings."""
    rope: Literal["linear", "ntk", "yarn", "dynamic"] = "linear"
    """Scaling of positions by f = length / own length. linear: divide all frequencies by f (position interpolation);
    ntk: raise the base of the frequencies until the lowest is divided by f; yarn: divide low frequencies, keep high
    ones; dynamic: as ntk, by the length of each input (frequencies change as a text grows, so cached keys go stale)."""
    attention: str = "shifted"
    """Attention during training: shifted (LongLoRA's S2, without its leak), llp, window, or full (the model's own)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that attention: group of shifted, segment of llp, width of window; a quarter of length by default."""
    keep_attention: bool = False
    """Keep that attention in the extended model; otherwise it attends in full, like the original."""
    control: bool = False
    """Also train a second adapter on the same windows and steps, cut into parts of the model's own length, and measure
    it at the full length with positions scaled but untrained."""
    lora: FactorsConfig = field(default_factory=FactorsConfig)
    """Trained weights."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and its split; the tokenizer is the model's own."""
    batch: LongBatchConfig = field(default_factory=LongBatchConfig)
    """Windows in one step."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-4, weight_decay=0.0))
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="constant", warmup=20))
    """Learning rate over the steps."""
    run: RunConfig = field(default_factory=_run)
    """Folder, steps and reports."""
    eval: PositionsConfig = field(default_factory=PositionsConfig)
    """Report of the loss by position."""

    def __post_init__(self) -> None:
        self.check_least(length=4)
        self.schedule.check_steps(self.run.steps)
        for name in ("tokenizer", "vocab_size", "pack"):
            if getattr(self.data, name) != getattr(DataConfig(), name):
                raise ValueError(
                    f"data.{name}={getattr(self.data, name)!r} has no effect: an extension uses the model's tokenizer "
                    "and cuts windows from the unpacked text; leave it out"
                )
        for name in ("prompt", "sample_tokens", "sample_temperature"):
            if getattr(self.run, name) != getattr(RunConfig(), name):
                raise ValueError(
                    f"run.{name}={getattr(self.run, name)!r} has no effect: an extension draws no samples; leave it out"
                )
        if self.keep_attention and self.attention == "full":
            raise ValueError("keep_attention=true has no effect with attention=full; leave one out")


WINDOWED = ("latte_macchiato",)
"""Mechanisms with a window branch that training can close."""
NEW = ("latte_macchiato", "linear")
"""Mechanisms with parameters that full attention lacks."""


@dataclass(frozen=True, kw_only=True)
class MatchConfig(Config):
    """Attention transfer: each replaced layer learns the output of the layer it replaces, from the same input."""

    steps: int = 500
    """Optimizer steps."""
    lr: float = 3e-3
    """Peak learning rate of AdamW: warmup over a twentieth of the steps, then half a cosine down to a tenth."""
    train: Literal["attention", "new"] = "attention"
    """attention: all attention weights of the replaced layers; new: only those that full attention lacks."""
    window_dropout: float | None = None
    """Probability of closing a layer's window in a forward pass of the first step; falls linearly to 0 at the last
    step (None: 0.5 for latte_macchiato, 0 for mechanisms without a window branch)."""

    def __post_init__(self) -> None:
        self.check_least("match", steps=1)
        check_positive("match.", lr=self.lr)
        check_fraction("match.", window_dropout=self.window_dropout)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """Low-rank adaptation: factors in all linear layers but the head, and the new parameters, learn the next token."""

    rank: int = 8
    """Rank of the factors, which are merged into the weights at the end."""
    alpha: int | None = None
    """Scale of the factors, alpha / rank (None: alpha is twice the rank)."""
    steps: int = 500
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate of AdamW, on the schedule of match.lr."""
    window_dropout: float | None = None
    """As match.window_dropout, for this stage (None: 0.25 for latte_macchiato)."""

    def __post_init__(self) -> None:
        self.check_least("lora", rank=1, steps=1, alpha=1)
        check_positive("lora.", lr=self.lr)
        check_fraction("lora.", window_dropout=self.window_dropout)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(Config):
    """Measurements of the original and after each stage."""

    windows: int = 64
    """Held-out windows of batch.length tokens to evaluate (all if there are fewer)."""
    passkeys: int = 32
    """Texts of batch.length tokens that end by asking for a key hidden in them; 0: none."""
    digits: int = 3
    """Digits of a key."""
    contexts: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192])
    """Tokens of context at which decoding speed and state size are measured, before and after the conversion."""
    repeats: int = 32
    """Tokens timed at each context."""

    def __post_init__(self) -> None:
        self.check_least("measure", windows=1, passkeys=0, digits=1, repeats=1)
        for context in self.contexts:
            check_at_least(1, "measure.", contexts=context)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """Convert a model: the mechanism, the layers that keep full attention, the text and both trainings."""

    out: str = "runs/converted"
    """Folder of the result. The same command resumes after the last complete stage."""
    attention: Literal["latte_macchiato", "linear", "llp", "window"] = "llp"
    """Mechanism that replaces full attention."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of the mechanism, as --options.llp.segment 64; `subquad list NAME` shows them."""
    keep_every: int = 4
    """Keep full attention in every Nth layer, the last of each group (0: in none)."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, read with the model's own tokenizer, and its held-out part."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Tokens in one step of both trainings; batch.length is also the length of measured windows."""
    match: MatchConfig = field(default_factory=MatchConfig)
    """Attention transfer."""
    lora: TuneConfig = field(default_factory=TuneConfig)
    """Low-rank adaptation of the whole model after the transfer."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Terms of that adaptation's loss beside the cross-entropy."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    """Measurements."""
    seed: int = 0
    """Seed of new weights, the order of the text and window dropout."""
    threads: int | None = None
    """CPU threads of PyTorch (None: automatic). Bitwise repetition needs the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU if PyTorch finds one; cpu: never a GPU."""

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out must name a folder, got ''")
        if self.keep_every < 0 or self.keep_every == 1:
            raise ValueError(f"keep_every must be 0 (replace all layers) or at least 2, got {self.keep_every}")
        self.check_least(seed=0, threads=1)
        for name in self.options:
            if name != self.attention:
                raise ValueError(f"options.{name} has no effect with attention={self.attention}; leave it out")
        if self.match.train == "new" and self.attention not in NEW:
            raise ValueError(
                f"match.train=new trains nothing: {self.attention} has no new parameters; choose attention"
            )
        for name in ("match", "lora"):
            if getattr(self, name).window_dropout and self.attention not in WINDOWED:
                raise ValueError(f"{name}.window_dropout has no effect: {self.attention} has no window branch to close")
        if self.data.tokenizer != DataConfig().tokenizer or self.data.vocab_size != DataConfig().vocab_size:
            raise ValueError("a conversion uses the model's tokenizer: leave out data.tokenizer and data.vocab_size")

    def window_dropout(self, stage: Literal["match", "lora"]) -> float:
        """Return the probability of closing a window at the first step of `stage`."""
        chosen: float | None = getattr(self, stage).window_dropout
        usual = {"match": 0.5, "lora": 0.25}[stage] if self.attention in WINDOWED else 0.0
        return usual if chosen is None else chosen
