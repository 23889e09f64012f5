"""Tasks on labelled sequences: classification, and pretraining without the labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from subquad.data.augment import augmentation, check_whole
from subquad.data.labelled import LabelledCorpus, labelled_corpus
from subquad.data.lra.store import Sequences
from subquad.models import Classifier
from subquad.models.build import build_encoder
from subquad.models.encoder import EncoderConfig
from subquad.models.pretraining import Hiding, PretrainingModel
from subquad.training.config import TrainConfig
from subquad.training.memory import check_fits
from subquad.training.task import Batch, Items, Task, count_items, fitted, preparing, rows, spread

FOLDER = "pretrain"
"""Subfolder of the run's folder for the first phase."""
OWN = ("class_token",)
"""Encoder parameters that causal pretraining lacks: a class token in front would see no other token."""


def labelled(config: TrainConfig, console: Console | None = None) -> LabelledCorpus:
    """Return the labelled sequences of `config`, with progress on the console. Raises like `labelled_corpus`."""
    return preparing(
        console, "sequences", lambda progress: labelled_corpus(config.classify, config.batch.length, progress=progress)
    )


class _LabelledTask(Task):
    """Base of the tasks on labelled sequences."""

    @classmethod
    def check_source(cls, config: TrainConfig) -> None:
        config.classify.check_source()

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise `ValueError` for impossible sequences, an impossible encoder or first phase."""
        if config.classify.dataset == "toy":  # making or reading the others takes long
            labelled(config)
        with torch.device("meta"):
            check_fits(Classifier(config.encoder(num_classes=2)), config)
        check_pretraining(config)


@dataclass(frozen=True, kw_only=True)
class ClassifyTask(_LabelledTask):
    """Label whole sequences."""

    data: LabelledCorpus
    encoder: dict[str, Tensor] | None = None
    """Initial weights of the encoder from the first phase, if there was one."""

    unit: ClassVar[str] = "example"

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        corpus = labelled(config, console)
        config = _with_vocabulary(config, corpus)
        check_pretraining(config)
        options, augment = config.classify, None
        if options.augment:
            if isinstance(corpus.train, Sequences):
                check_whole(options.dataset, corpus.train.full_lengths, config.batch.length)
            augment = augmentation(options.dataset)
        return cls(
            config=config,
            data=corpus,
            train=corpus.train,
            held_out=spread(corpus.held_out, config.run.eval_windows),
            identity={"task": "classify", "pooling": options.pooling, "data": corpus.fingerprint, **_changes(config)},
            augment=augment,
        )

    def new_model(self) -> Any:
        """Return a new classifier, initialised from the current random state or the first phase."""
        from subquad.hf.encoders import Denoising, SubquadClassifierConfig, SubquadEncoderForSequenceClassification

        classes, options = self.data.classes, self.config.pretrain
        encoder = self.config.encoder(len(classes))
        model = SubquadEncoderForSequenceClassification(SubquadClassifierConfig.from_encoder(encoder, classes=classes))
        if options.joint_weight > 0:
            model.denoising = Denoising(options.joint_weight, Hiding(options.mask_fraction, options.random_fraction))
        return model if self.encoder is None else begin_with(model, self.encoder)

    def first_phase(self) -> TrainConfig | None:
        return None if self.config.pretrain.kind == "none" else first_phase(self.config)

    def begun_with(self, model: Any) -> Self:
        """Return the task whose classifier starts from the encoder of the pretrained `model`."""
        weights = {name: tensor.cpu() for name, tensor in model.model.encoder.state_dict().items()}
        return replace(self, encoder=weights)

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and whether the most likely class of each sequence is its label."""
        output = model(**batch)
        return {"loss": rows(output.loss, batch), "right": output.logits.argmax(-1) == batch["labels"]}

    def measure(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        return {**super().measure(values), "eval_accuracy": float(values["right"].mean())}

    @staticmethod
    def window_bytes(config: TrainConfig, length: int) -> float | None:
        """Return the activation bytes of an example of `length` tokens."""
        with torch.device("meta"):
            model = Classifier(config.encoder(2))
        return model.cost(length).activation_bytes


class Unlabelled(Dataset[Batch]):
    """The sequences of labelled items without their labels; each sequence of a pair is an item of its own."""

    def __init__(self, items: Items, towers: int) -> None:
        self.items, self.towers = items, towers

    def __len__(self) -> int:
        return self.towers * count_items(self.items)

    def __getitem__(self, index: int) -> Batch:
        number, tower = divmod(index, self.towers)
        prefix = "pair_" if tower else ""
        item = self.items[number]
        tokens_T = item[f"{prefix}input_ids"]
        return {"input_ids": tokens_T, "attention_mask": item[f"{prefix}attention_mask"], "labels": tokens_T}


@dataclass(frozen=True, kw_only=True)
class PretrainTask(_LabelledTask):
    """Pretrain on a classification's training sequences without labels; validation and test parts are never read."""

    unit: ClassVar[str] = "predicted token"
    begins_another: ClassVar[bool] = True

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        """Read or make the sequences and return the task. Raises the `ValueError`s of `train`.

        `run.eval_windows` sequences, but at most a tenth, are held out for the periodic evaluation: whole examples,
        evenly spread, because files may be sorted by class.
        """
        corpus = labelled(config, console)
        config = _with_vocabulary(config, corpus)
        check_pretraining(config)
        towers, examples = config.classify.towers, count_items(corpus.train)
        if examples < 2:
            raise ValueError(f"pretraining needs at least 2 examples, one of them held out, got {examples}")
        items = Unlabelled(corpus.train, towers)
        measured = max(1, min(config.run.eval_windows, len(items) // 10) // towers)
        aside = {(i + 1) * examples // measured - 1 for i in range(measured)}
        learned = [number for number in range(len(items)) if number // towers not in aside]
        return cls(
            config=config,
            data=corpus,
            train=Subset(items, learned),
            held_out=Subset(items, [towers * number + i for number in sorted(aside) for i in range(towers)]),
            identity={"task": "pretrain", "data": corpus.fingerprint, "objective": _objective(config)},
        )

    def new_model(self) -> Any:
        from subquad.hf.encoders import SubquadForPreTraining, SubquadPretrainingConfig

        options = self.config.pretrain
        return SubquadForPreTraining(
            SubquadPretrainingConfig.from_encoder(
                pretrained_encoder(self.config),
                objective=options.kind,
                mask_fraction=options.mask_fraction,
                random_fraction=options.random_fraction,
            )
        )


def pretrained_encoder(config: TrainConfig) -> EncoderConfig:
    """Return the encoder configuration of the first phase: the classifier's, causal if pretrain.kind is causal."""
    encoder = config.encoder(2).replace(towers=1)
    if config.pretrain.kind == "causal":
        pooling = "mean" if encoder.pooling == "class" else encoder.pooling
        encoder = encoder.replace(causal=True, pooling=pooling)
    return encoder


def check_pretraining(config: TrainConfig) -> None:
    """Raise `ValueError` if the first phase is impossible or its weights would not fit the classifier."""
    options = config.pretrain
    if not options.effective:
        return
    with torch.device("meta"):
        target = build_encoder(config.encoder(2))
        if options.joint_weight > 0 and not target.vector_per_token:
            raise ValueError(
                f"pretrain.joint_weight={options.joint_weight}: attention {config.model.attention!r} has no vector per "
                "token to predict hidden tokens from; leave it out, or choose a mechanism"
            )
        if options.kind == "none":
            return
        try:
            source = PretrainingModel(pretrained_encoder(config), options.kind)
        except ValueError as error:
            raise ValueError(f"pretrain.kind={options.kind}: {error}") from error
    if source.queries is not None and len(source.queries) < config.batch.length:
        raise ValueError(
            f"pretrain.kind={options.kind}: {config.model.attention} has queries for only "
            f"model.max_positions={config.model.max_positions} positions, below batch.length={config.batch.length}; "
            "raise model.max_positions"
        )
    has, needs = _shapes(source.encoder), _shapes(target)
    wrong = sorted(name for name in has.keys() | needs.keys() if name not in OWN and has.get(name) != needs.get(name))
    if wrong:
        shown = ", ".join([*wrong[:3], *(["..."] if wrong[3:] else [])])
        raise ValueError(
            f"pretrain.kind={options.kind}: the causal form of attention {config.model.attention!r} doesn't have the "
            f"weights of the bidirectional form used to classify ({shown}); choose denoise or classify.causal=true"
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def first_phase(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the pretraining run, in the subfolder `pretrain` of the classifier's run."""
    options, run = config.pretrain, config.run
    return config.replace(
        task="pretrain",
        optimizer=config.optimizer.replace(lr=config.optimizer.lr if options.lr is None else options.lr),
        schedule=config.schedule.replace(warmup=min(config.schedule.warmup_of(options.steps), options.steps // 10)),
        run=run.replace(folder=str(Path(run.folder) / FOLDER), steps=options.steps),
    )


def begin_with(model: Any, weights: dict[str, Tensor]) -> Any:
    """Load encoder `weights` into the classifier and return it; parameters in `OWN` may keep their initial values."""
    missing, unexpected = model.model.encoder.load_state_dict(weights, strict=False)
    wrong = [*(name for name in missing if name not in OWN), *unexpected]
    if wrong:
        raise ValueError(f"the weights of the first phase don't fit the classifier: {', '.join(wrong)}")
    return model


def _with_vocabulary(config: TrainConfig, corpus: LabelledCorpus) -> TrainConfig:
    """Return `config` with the data's vocabulary size, plus a mask token if tokens are to be hidden."""
    mask = config.pretrain.hides
    source = f"as in the sequences{', plus a mask token' if mask else ''}"
    return config.replace(model=fitted(config.model, corpus.vocab_size + mask, source))


def _changes(config: TrainConfig) -> dict[str, Any]:
    """Return the non-default settings besides the data that must not change when the run is resumed."""
    values: dict[str, Any] = {name: True for name in ("causal", "augment") if getattr(config.classify, name)}
    return values | ({"pretrain": config.pretrain.effective} if config.pretrain.effective else {})


def _objective(config: TrainConfig) -> dict[str, str | float | bool]:
    options = config.pretrain
    values: dict[str, str | float | bool] = {"kind": options.kind, "causal": config.classify.causal}
    if options.kind == "denoise":
        values |= {"mask_fraction": options.mask_fraction, "random_fraction": options.random_fraction}
        if config.classify.pooling == "class":
            values["class_token"] = True  # an additional weight
    return values
