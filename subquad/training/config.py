"""The configuration of a training run, which the command line reads without loading the code that runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.config import Config, check_positive, later
from subquad.data.config import DataConfig, ImageConfig, LabelledConfig, ProbeConfig
from subquad.models.config import DecoderConfig
from subquad.models.encoder import EncoderConfig, Pooling
from subquad.models.pretraining import check_hiding
from subquad.training.schedule import ScheduleConfig

AUGMENTED = ("image", "listops", "pathfinder32", "pathfinder64", "pathfinder128", "retrieval")
"""Data sets whose sequences can be changed without changing their labels (`subquad.data.augment`)."""
TASK_GROUPS = {
    "language": ("data",),
    "classify": ("classify", "pretrain"),
    "pretrain": ("classify", "pretrain"),
    "image": ("image",),
    "probe": ("probe",),
}
"""The groups of settings that are of one task, or two, alone."""
FIRST_PHASES = ("pretrain",)
"""Tasks that are the first phase of another, which has to be named."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """The optimizer, as PyTorch has it."""

    name: Literal["adamw", "adam", "radam", "muon"] = "adamw"
    """adamw, adam, radam, or muon (Muon for the matrices of the layers, AdamW for everything else)."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decay of matrices; norms, biases and embeddings never decay. Decoupled in adamw, muon; L2 in adam, radam."""
    momentum: float = 0.95
    """Momentum of Muon."""
    matrix_lr: float | None = None
    """Peak learning rate of the matrices that Muon trains, on AdamW's scale (None: the same as lr)."""
    clip: float = 1.0
    """Largest norm of the gradient of all parameters; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        check_positive("optimizer.", lr=self.lr, eps=self.eps, matrix_lr=self.matrix_lr)
        self.check_least("optimizer", weight_decay=0, clip=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers, each at least 0 and below 1, got {self.betas}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum must be at least 0 and below 1, got {self.momentum}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """The tokens that one step sees: length x size x accumulation x processes (those of one window count once)."""

    length: int = 512
    """Tokens in one window."""
    size: int = 8
    """Windows in one forward pass of one process."""
    accumulation: int = 1
    """Forward passes whose gradients are added up for one step."""

    def __post_init__(self) -> None:
        self.check_least("batch", length=2, size=1, accumulation=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Where the run lives, how long it takes and how often it reports."""

    folder: str = "runs/default"
    """Folder of the run: configuration, metrics, checkpoints, samples, the final model."""
    steps: int = 1000
    """Optimizer steps in all."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and dropout."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: go on from the newest complete checkpoint where there is one; must: fail without one; never: refuse a
    folder that holds checkpoints."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 100
    """Steps between two evaluations on held-out windows; the last step is always evaluated. 0: never."""
    eval_windows: int = 32
    """Held-out windows in each of those evaluations, evenly spread (all of them where there are fewer)."""
    save_every: int = 100
    """Steps between two checkpoints; a best held-out loss and the last step are always saved."""
    keep: int = 2
    """Newest checkpoints to keep, besides the one with the best held-out loss."""
    max_minutes: float | None = None
    """Stop cleanly, with a checkpoint, after so many minutes of training in this process (None: no limit)."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """auto: bfloat16 autocast where the GPU or the CPU has instructions for its products (on a CPU AVX-512 BF16 or AMX;
    elsewhere it is far slower), else float32. Weights and optimizer states are float32 always."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: a GPU where PyTorch finds one; cpu: never."""
    activation_checkpointing: bool = False
    """Whether training keeps the input of each layer alone and computes the rest again in the backward pass: less
    memory, about a third more time, the same gradients."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that isn't finite does. stop: ends the run before the step. skip: leaves the step out;
    its windows are used up and the learning rate goes on."""
    nonfinite_limit: int = 10
    """With nonfinite=skip, the steps left out in a row that end the run after all."""
    threads: int | None = None
    """Threads of PyTorch on the CPU (None: its own choice). Bitwise repetition needs the same number."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = later(("tensorboard",))
    """Where the numbers of metrics.jsonl go too: tensorboard (in the folder), wandb, mlflow (installed apart)."""
    prompt: str = "import "
    """Text that the samples at the end go on from."""
    sample_tokens: int = 200
    """Tokens in each of those samples."""
    sample_temperature: float = 0.8
    """Temperature of the samples that are not greedy."""

    def __post_init__(self) -> None:
        self.check_least("run", steps=1, log_every=1, save_every=1, keep=1, eval_windows=1, nonfinite_limit=1)
        self.check_least("run", threads=1, eval_every=0, sample_tokens=0, seed=0)
        check_positive("run.", sample_temperature=self.sample_temperature, max_minutes=self.max_minutes)
        if not self.folder:
            raise ValueError("run.folder must name a folder, got ''")
        if not self.prompt:
            raise ValueError("run.prompt must hold some text for the samples to go on from, got ''")


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(LabelledConfig):
    """Labelled sequences of up to batch.length tokens, which task=classify learns."""

    pooling: Pooling = "mean"
    """What a sequence is judged by: the mean of its vectors, its last vector, or that of a class token before it."""
    causal: bool = False
    """Whether a token sees itself and earlier ones only: the causal form of the mechanisms instead of the other."""
    augment: bool = False
    """Whether training changes each sequence at random in a way that keeps its label: image: mirrored left to right,
    shifted; pathfinder: mirrored both ways, turned by right angles; listops: the arguments of each operator in another
    order; retrieval: the two papers swapped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment and self.dataset not in AUGMENTED:
            raise ValueError(
                f"classify.augment=true: no change is known to keep the labels of dataset {self.dataset!r}; leave it "
                f"out, or choose one of {', '.join(AUGMENTED)}"
            )

    @property
    def towers(self) -> int:
        """Sequences of an example."""
        return 2 if self.dataset == "retrieval" else 1


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """The first phase of a classifier: its encoder learns from the training sequences without their labels."""

    kind: Literal["none", "denoise", "causal"] = "none"
    """none: nothing; denoise: the tokens that were hidden, from all others; causal: the next token, by the causal form,
    whose weights the form that classifies then takes over."""
    steps: int = 1000
    """Optimizer steps of this first phase; its warm-up is schedule.warmup, but at most a tenth of them."""
    lr: float | None = None
    """Its peak learning rate (None: optimizer.lr)."""
    mask_fraction: float = 0.15
    """Share of the tokens that denoising hides (Amos et al. 2023 hide half of the pixels of images)."""
    random_fraction: float = 0.0
    """Share of the hidden tokens that become random ones instead of the mask token."""
    joint_weight: float = 0.0
    """Weight of a denoising loss that is added to the labels' own in the second phase, which then reads sequences with
    hidden tokens (Miralles-Gonzalez et al. 2025: 1, mask_fraction 0.3, random_fraction 1/3); 0: none. Works with any
    kind, none too."""

    def __post_init__(self) -> None:
        self.check_least("pretrain", steps=1)
        check_positive("pretrain.", lr=self.lr)
        check_hiding(self.mask_fraction, self.random_fraction, "pretrain.")
        if not (self.joint_weight >= 0 and math.isfinite(self.joint_weight)):
            raise ValueError(f"pretrain.joint_weight must be at least 0, got {self.joint_weight}")

    @property
    def effective(self) -> dict[str, Any]:
        """The settings that have an effect, by name."""
        values = {} if self.kind == "none" else {"kind": self.kind, "steps": self.steps, "lr": self.lr}
        if self.hides:
            values |= {"mask_fraction": self.mask_fraction, "random_fraction": self.random_fraction}
        return values | ({"joint_weight": self.joint_weight} if self.joint_weight > 0 else {})

    @property
    def hides(self) -> bool:
        """Whether tokens are hidden, so that the vocabulary needs a mask token."""
        return self.kind == "denoise" or self.joint_weight > 0


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Low-rank factors `W + s B A` beside the weights W of a trained model, which stay as they are."""

    rank: int = 0
    """Rank r of the factors; 0: no factors, all weights train."""
    base: str | None = None
    """The folder of the run whose model is adapted; its model and its tokenizer are taken."""
    alpha: int | None = None
    """The factors are scaled by s = alpha / rank, with rslora by alpha / sqrt(rank) (None: twice the rank)."""
    dropout: float = 0.0
    """Dropout of what the factors read, in training."""
    targets: list[str] = field(default_factory=list)
    """Linear layers that get factors: ends of their names, as query or feedforward.up, or regular expressions for whole
    names (none given: all but heads and look-ups)."""
    dora: bool = False
    """DoRA (Liu et al. 2024): the size of each row of a weight trains apart from its direction."""
    rslora: bool = False
    """rsLoRA (Kalajdzievski 2023): the scale falls with the root of the rank."""
    train_head: bool = False
    """Whether the head of a classifier trains too, whole; for classes that are not the base's it always does."""

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
            raise ValueError(f"lora.rank={self.rank} needs lora.base: the folder of the run whose model is adapted")
        self.check_least("lora", alpha=1)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Config):
    """The share of each process that `torchrun` starts. One step sees data processes x batch.size x batch.accumulation
    windows, where the data processes are all processes divided by `context`."""

    context: int = 1
    """Processes that share each window, of which every one holds a part of the tokens (task=language)."""
    shard: bool = False
    """Whether every process keeps a part of the weights, gradients and optimizer states (FSDP2), not all of them."""
    timeout: float = 600.0
    """Seconds that a process waits for the others before it gives up."""

    def __post_init__(self) -> None:
        self.check_least("parallel", context=1)
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"parallel.timeout must be a positive number of seconds, got {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """A training run: a model, a text, labelled sequences, images or a probe, an optimizer and a folder."""

    task: Literal["language", "classify", "pretrain", "image", "probe"] = "language"
    """language: predict the next token of the text in data; classify: label the sequences in classify, by the
    bidirectional form of the mechanisms or (classify.causal) the causal one; pretrain: what pretrain.kind does first,
    alone; image: predict the next pixel of the images in image; probe: predict what the
    sequences in probe ask to be remembered."""
    model: DecoderConfig = field(default_factory=DecoderConfig)
    """The model; its vocabulary size follows the tokenizer, or the made-up sequences."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text, its tokenizer and the split (task=language)."""
    classify: ClassifyConfig = field(default_factory=ClassifyConfig)
    """The labelled sequences (task=classify)."""
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    """What a classifier learns from its training sequences before it sees their labels (task=classify)."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """The images and how a pixel is predicted (task=image)."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """What is to be remembered (task=probe), in sequences of batch.length tokens."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank factors to train instead of all weights."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Tokens in one step."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    run: RunConfig = field(default_factory=RunConfig)
    """Folder, length and reports."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """What several processes share."""

    def __post_init__(self) -> None:
        if self.model.position == "learned" and self.batch.length > self.model.max_positions:
            raise ValueError(
                f"batch.length {self.batch.length} is longer than the model can take: position=learned has "
                f"model.max_positions={self.model.max_positions} rows; raise them, shorten the windows, or choose "
                "position rope, sinusoidal or none"
            )
        if self.schedule.warmup >= self.run.steps:
            raise ValueError(f"schedule.warmup must be below run.steps={self.run.steps}, got {self.schedule.warmup}")
        own = self.groups
        for group in ("data", "classify", "pretrain", "image", "probe"):
            if group not in own:
                given = getattr(self, group)
                default = type(given)().to_dict()
                for name, value in given.to_dict().items():
                    if value != default[name] and (group, name) != ("data", "cache"):
                        raise ValueError(f"{group}.{name}={value!r} has no effect with task={self.task}; leave it out")
        if self.task in FIRST_PHASES and self.pretrain.kind == "none":
            raise ValueError("task=pretrain needs to know what is learned: pretrain.kind must be denoise or causal")
        if self.lora.rank and self.pretrain.effective:
            raise ValueError(
                "lora.rank adapts a trained model, which needs no first phase and no second loss: leave pretrain.kind "
                "and pretrain.joint_weight out"
            )
        self._check_parallel()
        if "classify" in own:
            self.encoder(2)
        elif "probe" in own:
            self.probe.first_asked(self.batch.length)

    def _check_parallel(self) -> None:
        """Raise `ValueError` for what no number of processes can do."""
        if self.parallel.shard and self.lora.rank:
            raise ValueError(
                "parallel.shard=true is not there for LoRA, whose factors are small: leave parallel.shard out (every "
                "process then holds the whole base) or lora.rank"
            )
        context = self.parallel.context
        if context > 1 and not self.reads_text:
            raise ValueError(f"parallel.context={context} is for task=language, got task={self.task}; leave it out")
        if context > 1 and self.lora.rank:
            raise ValueError(f"parallel.context={context} is not there for LoRA; leave it or lora.rank out")
        if context > 1 and self.data.pack == "documents":
            raise ValueError(f"parallel.context={context} takes no packed documents: set data.pack=stream")
        for name in ("dropout", "attention_dropout"):
            if context > 1 and getattr(self.model, name):
                raise ValueError(
                    f"parallel.context={context} takes no dropout, of which each process would draw other numbers: set "
                    f"model.{name}=0, got {getattr(self.model, name):g}"
                )
        if self.batch.length % context:
            raise ValueError(
                f"{context} processes share a window equally: batch.length={self.batch.length} must be a multiple of "
                f"parallel.context={context}"
            )

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of settings that are the task's own."""
        return TASK_GROUPS[self.task]

    @property
    def reads_text(self) -> bool:
        """Whether the run learns from the text in `data`, with its tokenizer."""
        return "data" in self.groups

    def encoder(self, num_classes: int) -> EncoderConfig:
        """The model as a classifier."""
        options = self.classify
        return EncoderConfig.from_decoder(
            self.model,
            num_classes=num_classes,
            pooling=options.pooling,
            causal=options.causal,
            towers=options.towers,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens that one process sees in one step."""
        return self.batch.length * self.batch.size * self.batch.accumulation
