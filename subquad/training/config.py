"""Configuration of a training run, loaded by the command line without Accelerate and transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from subquad.config import Config, check_positive
from subquad.data.config import DataConfig, ImageConfig, LabelledConfig, ProbeConfig
from subquad.models.config import DecoderConfig
from subquad.models.encoder import EncoderConfig, Pooling
from subquad.models.pretraining import check_hiding
from subquad.training.losses import LossConfig
from subquad.training.schedule import ScheduleConfig

AUGMENTED = ("image", "listops", "pathfinder32", "pathfinder64", "pathfinder128", "retrieval")
"""Datasets with augmentation (`subquad.data.augment`)."""
TASK_GROUPS = {
    "language": ("data", "loss"),
    "classify": ("classify", "pretrain"),
    "pretrain": ("classify", "pretrain"),
    "image": ("image",),
    "probe": ("probe", "loss"),
}
"""Groups of settings that only some tasks use."""
Trained = TypeVar("Trained", bound=Config)
FIRST_PHASES = ("pretrain",)
"""Tasks that are normally the first phase of another; to run one alone, pretrain.kind must be set."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """One of PyTorch's optimizers."""

    name: Literal["adamw", "adam", "radam", "muon"] = "adamw"
    """Optimizer; muon uses Muon for the matrices of the layers and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the running means of the gradient and its square."""
    eps: float = 1e-8
    """Constant added to the denominator."""
    weight_decay: float = 0.1
    """Weight decay of matrices only: decoupled in adamw and muon, L2 in adam and radam."""
    momentum: float = 0.95
    """Momentum of Muon."""
    matrix_lr: float | None = None
    """Peak learning rate of Muon's matrices, on AdamW's scale (None: lr)."""
    clip: float = 1.0
    """Largest gradient norm over all parameters (0: no clipping)."""

    def __post_init__(self) -> None:
        check_positive("optimizer.", lr=self.lr, eps=self.eps, matrix_lr=self.matrix_lr)
        self.check_least("optimizer", weight_decay=0, clip=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers, each at least 0 and below 1, got {self.betas}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must be at least 0 and below 1, got {self.momentum}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """Tokens of one step: length x size x accumulation x processes / parallel.context."""

    length: int = 512
    """Tokens in one window."""
    size: int = 8
    """Windows per forward pass and process."""
    accumulation: int = 1
    """Forward passes whose gradients are summed into one step."""

    def __post_init__(self) -> None:
        self.check_least("batch", length=2, size=1, accumulation=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """The run's folder, length, reports and checkpoints."""

    folder: str = "runs/default"
    """Folder for the configuration, metrics, checkpoints, samples and final model."""
    steps: int | None = None
    """Optimizer steps in total (None: as many as `minutes` takes)."""
    minutes: float = 5.0
    """Minutes to train, evaluations included; not used if `steps` is given. The speed of the first steps fixes the
    number of steps, which `config.yaml` keeps: a resumed run has the same."""
    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: resume from the newest complete checkpoint, if any; must: fail without one; never: fail if there is one."""
    log_every: int = 10
    """Steps between metrics records."""
    eval_every: int | None = None
    """Steps between evaluations on held-out windows; the last step is always evaluated (0: no evaluations; None: a
    tenth of all steps, from 10 to 100)."""
    eval_windows: int = 32
    """Held-out windows per evaluation, evenly spread."""
    save_every: int = 100
    """Steps between checkpoints; the best held-out loss and the last step are always saved."""
    keep: int = 2
    """Newest checkpoints to keep besides the best one."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """bf16: bfloat16 autocast over float32 weights; auto: bf16 if the hardware multiplies it fast, else float32."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU if PyTorch finds one; cpu: always the CPU."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time, same gradients."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss or gradient, stop before the step, or skip the step and its windows."""
    nonfinite_limit: int = 10
    """Consecutive skipped steps that end the run (nonfinite=skip)."""
    threads: int | None = None
    """CPU threads of PyTorch (None: its default). Bitwise reproduction needs the same number."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that also get the metrics; wandb and mlflow must be installed."""
    weights: Literal["last", "best"] = "last"
    """Weights of the final model: the last step's, or those with the lowest held-out loss in training. best: a language
    model is chosen by the first half of the held-out text and reported on the second (with data.pack=stream)."""
    prompt: str | None = None
    """Prompt of the samples at the end (None: the beginning of the held-out text)."""
    sample_tokens: int = 200
    """Tokens per sample."""
    sample_temperature: float = 0.8
    """Temperature of the sampled texts; one sample is always greedy."""

    def evaluation_interval(self, steps: int) -> int:
        """Return the steps between evaluations of a run of `steps` steps (0: no evaluations)."""
        return max(10, min(100, steps // 10)) if self.eval_every is None else self.eval_every

    def __post_init__(self) -> None:
        self.check_least("run", steps=1, log_every=1, save_every=1, keep=1, eval_windows=1, nonfinite_limit=1)
        self.check_least("run", threads=1, eval_every=0, sample_tokens=0, seed=0)
        check_positive("run.", sample_temperature=self.sample_temperature, minutes=self.minutes)
        if not self.folder:
            raise ValueError("run.folder must name a folder, got ''")
        if self.prompt == "":
            raise ValueError("run.prompt must not be empty, got ''")


def with_steps(config: Trained, steps: int | None) -> Trained:
    """Return a training's configuration with the number of steps, and with a warm-up that ends within them."""
    groups: Any = config
    schedule = groups.schedule if steps is None else groups.schedule.within(steps)
    return config.replace(run=groups.run.replace(steps=steps), schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(LabelledConfig):
    """Labelled sequences of up to batch.length tokens (task=classify)."""

    pooling: Pooling = "mean"
    """Vector to classify: the mean over tokens, the last token's, or that of a class token."""
    causal: bool = False
    """Use the causal form of the mechanisms: tokens attend only to earlier ones and themselves."""
    augment: bool = False
    """Change training sequences at random without changing labels: flip and shift images, flip and rotate pathfinder,
    permute listops arguments, swap the papers of retrieval."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment and self.dataset not in AUGMENTED:
            raise ValueError(
                f"classify.augment=true: no augmentation exists for dataset {self.dataset!r}; leave it out, or choose "
                f"one of {', '.join(AUGMENTED)}"
            )

    @property
    def towers(self) -> int:
        """Sequences per example."""
        return 2 if self.dataset == "retrieval" else 1


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """Self-supervised first phase of a classifier's encoder on the training sequences."""

    kind: Literal["none", "denoise", "causal"] = "none"
    """denoise: predict hidden tokens; causal: predict the next token with the mechanism's causal form; none: skip."""
    steps: int = 1000
    """Optimizer steps of the first phase, before those of `run`; its warm-up is at most a tenth of them."""
    lr: float | None = None
    """Peak learning rate of the first phase (None: optimizer.lr)."""
    mask_fraction: float = 0.15
    """Fraction of the tokens that denoising hides (Amos et al. 2023: 0.5 for images)."""
    random_fraction: float = 0.0
    """Fraction of the hidden tokens that are replaced by random tokens, not the mask token."""
    joint_weight: float = 0.0
    """Weight of a denoising loss added while classifying, with any kind (0: none; Miralles-Gonzalez et al. 2025: 1,
    with mask_fraction 0.3 and random_fraction 1/3)."""

    def __post_init__(self) -> None:
        self.check_least("pretrain", steps=1)
        check_positive("pretrain.", lr=self.lr)
        check_hiding(self.mask_fraction, self.random_fraction, "pretrain.")
        if not (self.joint_weight >= 0 and math.isfinite(self.joint_weight)):
            raise ValueError(f"pretrain.joint_weight must be at least 0, got {self.joint_weight}")

    @property
    def effective(self) -> dict[str, Any]:
        """The settings that have an effect, by name; empty without pretraining and joint loss."""
        values = {} if self.kind == "none" else {"kind": self.kind, "steps": self.steps, "lr": self.lr}
        if self.hides:
            values |= {"mask_fraction": self.mask_fraction, "random_fraction": self.random_fraction}
        return values | ({"joint_weight": self.joint_weight} if self.joint_weight > 0 else {})

    @property
    def hides(self) -> bool:
        """Whether tokens are hidden, so that the vocabulary has a mask token."""
        return self.kind == "denoise" or self.joint_weight > 0


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """LoRA: train low-rank factors in `W + s B A` and keep the weights W of a trained model frozen."""

    rank: int = 0
    """Rank of the factors (0: no LoRA, train all weights)."""
    base: str | None = None
    """Run folder of the model to adapt; its tokenizer is used too."""
    alpha: int | None = None
    """Scale s = alpha / rank, or alpha / sqrt(rank) with rslora (None: twice the rank)."""
    dropout: float = 0.0
    """Dropout on the input of the factors."""
    targets: list[str] = field(default_factory=list)
    """Linear layers to adapt: name endings such as query, or regular expressions for full names (none given: all but
    heads and look-ups)."""
    dora: bool = False
    """Train the norm of each weight row separately (DoRA, Liu et al. 2024)."""
    rslora: bool = False
    """Divide the scale by sqrt(rank) instead of rank (rsLoRA, Kalajdzievski 2023)."""
    train_head: bool = False
    """Train a classifier's head fully; always so if the classes differ from the base's."""

    def __post_init__(self) -> None:
        self.check_least("lora", rank=0)
        if self.rank == 0:
            defaults = {name: entry.default for name, entry in self.__dataclass_fields__.items()} | {"targets": []}
            for name, value in self.to_dict().items():
                if value != defaults[name]:
                    raise ValueError(
                        f"lora.{name}={value!r} has no effect with lora.rank=0; give a rank or leave it out"
                    )
            return
        if not self.base:
            raise ValueError(f"lora.rank={self.rank} needs lora.base, the run folder of the model to adapt")
        self.check_least("lora", alpha=1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """How the processes that `torchrun` starts share the work. A step sees batch.size x batch.accumulation x
    processes / `context` windows."""

    context: int = 1
    """Processes that split the tokens of each window (task=language)."""
    shard: bool = False
    """Split weights, gradients and optimizer states over the processes (FSDP2)."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it fails."""

    def __post_init__(self) -> None:
        self.check_least("parallel", context=1)
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"parallel.timeout must be a positive number of seconds, got {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """A training run: a task, its data, a model, an optimizer and a folder."""

    task: Literal["language", "classify", "pretrain", "image", "probe"] = "language"
    """Predict the next token (language), label sequences (classify), run only their pretraining (pretrain), predict the
    next pixel (image) or recall what a probe asks (probe)."""
    model: DecoderConfig = field(default_factory=DecoderConfig)
    """Model; the data sets its vocabulary size."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text, tokenizer and split (task=language)."""
    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    """Labelled sequences (task=classify)."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """Pretraining of a classifier's encoder without labels (task=classify, pretrain)."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """Images and pixel prediction (task=image)."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """Memory probe in sequences of batch.length tokens (task=probe)."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Terms of the loss beside the cross-entropy (task=language, probe)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA: train low-rank factors instead of all weights."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Tokens per step."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule."""
    run: RunConfig = field(default_factory=RunConfig)
    """Folder, length, reports and checkpoints."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes (torchrun)."""

    def __post_init__(self) -> None:
        if self.model.position == "learned" and self.batch.length > self.model.max_positions:
            raise ValueError(
                f"batch.length={self.batch.length} is longer than the {self.model.max_positions} positions of "
                "position=learned; raise model.max_positions, shorten the windows, or choose position rope, sinusoidal "
                "or none"
            )
        self.schedule.check_steps(self.run.steps)
        if self.run.weights == "best" and self.reads_text and self.data.pack != "stream":
            raise ValueError(f"run.weights=best needs data.pack=stream, got {self.data.pack}: set run.weights=last")
        own = self.groups
        for group in ("data", "classify", "pretrain", "image", "probe", "loss"):
            if group not in own:
                given = getattr(self, group)
                default = type(given)().to_dict()
                for name, value in given.to_dict().items():
                    if value != default[name] and (group, name) != ("data", "cache"):
                        raise ValueError(f"{group}.{name}={value!r} has no effect with task={self.task}; leave it out")
        if self.task in FIRST_PHASES and self.pretrain.kind == "none":
            raise ValueError("task=pretrain needs pretrain.kind=denoise or causal, got none")
        if self.lora.rank and self.pretrain.effective:
            raise ValueError(
                "lora.rank adapts a trained model and can't be combined with pretraining: leave out pretrain.kind and "
                "pretrain.joint_weight"
            )
        self._check_parallel()
        if "classify" in own:
            self.encoder(2)
        elif "probe" in own:
            self.probe.first_asked(self.batch.length)

    def _check_parallel(self) -> None:
        """Raise `ValueError` for parallel settings that fit no number of processes."""
        if self.parallel.shard and self.lora.rank:
            raise ValueError(
                "parallel.shard=true doesn't support LoRA, whose factors are small: leave out parallel.shard (every "
                "process then holds the whole base) or lora.rank"
            )
        context = self.parallel.context
        if context > 1 and not self.reads_text:
            raise ValueError(f"parallel.context={context} needs task=language, got task={self.task}; leave it out")
        if context > 1 and self.lora.rank:
            raise ValueError(f"parallel.context={context} doesn't support LoRA; leave out it or lora.rank")
        if context > 1 and self.data.pack == "documents":
            raise ValueError(f"parallel.context={context} doesn't support packed documents: set data.pack=stream")
        for name in ("dropout", "attention_dropout"):
            if context > 1 and getattr(self.model, name):
                raise ValueError(
                    f"parallel.context={context} doesn't support dropout, because each process would draw other "
                    f"numbers: set model.{name}=0, got {getattr(self.model, name):g}"
                )
        if self.batch.length % context:
            raise ValueError(
                f"batch.length={self.batch.length} must be a multiple of parallel.context={context}, because processes "
                "share a window equally"
            )

    @property
    def groups(self) -> tuple[str, ...]:
        """The data groups that the task uses."""
        return TASK_GROUPS[self.task]

    @property
    def reads_text(self) -> bool:
        """Whether the run trains on the text in `data`."""
        return "data" in self.groups

    def encoder(self, num_classes: int) -> EncoderConfig:
        """Return the configuration of the model as a classifier of `num_classes` classes."""
        options = self.classify
        return EncoderConfig.from_decoder(
            self.model, num_classes=num_classes, pooling=options.pooling, causal=options.causal, towers=options.towers
        )

    @property
    def step_tokens(self) -> int:
        """Tokens per step and process."""
        return self.batch.length * self.batch.size * self.batch.accumulation
