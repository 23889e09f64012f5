"""The labels of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from subquad.data.labelled import LabelledCorpus, labelled_corpus
from subquad.training._task import Task, fitted, preparing, spread
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from torch import Tensor
    from transformers import EvalPrediction

    from subquad.hf import SubquadForSequenceClassification


def labelled(config: TrainConfig, console: Console | None = None) -> LabelledCorpus:
    """The labelled sequences of `config`; the console hears what is being done. Raises as `labelled_corpus`."""
    return preparing(
        console, "sequences", lambda progress: labelled_corpus(config.classify, config.batch.length, progress=progress)
    )


def classification_task(config: TrainConfig, console: Console | None = None) -> Task:
    """The labelled sequences of `config`. Raises `ValueError` as `train` says."""
    from subquad.training.pretrain import check_pretraining

    corpus = labelled(config, console)
    config = with_vocabulary(config, corpus)
    check_pretraining(config)
    options = config.classify
    return Task(
        config=config,
        data=corpus,
        train=corpus.train,
        count=size(corpus.train),
        held_out=spread(corpus.held_out, size(corpus.held_out), config.run.eval_windows),
        make_model=lambda: _model(config, corpus),
        identity={"task": "classify", "pooling": options.pooling, "data": corpus.fingerprint, **_changes(config)},
        measure=_accuracy,
        augment=_augmentation(config, corpus) if options.augment else None,
    )


def with_vocabulary(config: TrainConfig, corpus: LabelledCorpus) -> TrainConfig:
    """The configuration with the data's vocabulary, and a mask token after it where tokens are to be hidden."""
    mask = config.pretrain.hides
    source = f"as the sequences have it{', and a mask token' if mask else ''}"
    return config.replace(model=fitted(config.model, corpus.vocab_size + mask, source))


def size(items: Any) -> int:
    """How many items a map-style dataset has."""
    return len(items)


def _model(config: TrainConfig, corpus: LabelledCorpus) -> SubquadForSequenceClassification:
    from subquad.hf import SubquadForSequenceClassification
    from subquad.hf.encoders import Denoising, SubquadClassifierConfig
    from subquad.models.pretraining import Hiding

    encoder, options = config.encoder(len(corpus.classes)), config.pretrain
    model = SubquadForSequenceClassification(SubquadClassifierConfig.from_encoder(encoder, classes=corpus.classes))
    if options.joint_weight > 0:
        model.denoising = Denoising(options.joint_weight, Hiding(options.mask_fraction, options.random_fraction))
    return model


def _changes(config: TrainConfig) -> dict[str, Any]:
    """What must stay the same beside the data, where it is not the default."""
    values: dict[str, Any] = {}
    if config.classify.causal:
        values["causal"] = True
    if config.classify.augment:
        values["augment"] = True
    if config.pretrain.effective:
        values["pretrain"] = config.pretrain.effective
    return values


def _augmentation(config: TrainConfig, corpus: LabelledCorpus) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    from subquad.data.augment import augmentation, check_whole
    from subquad.data.lra.store import Sequences

    dataset, train = config.classify.dataset, corpus.train
    if isinstance(train, Sequences):
        check_whole(dataset, train.full_lengths, config.batch.length)
    return augmentation(dataset)


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}
