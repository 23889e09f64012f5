"""The labels of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from subquad.data.labelled import LabelledCorpus
from subquad.data.toy import toy
from subquad.training._task import Task, fitted, spread
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import EvalPrediction


def labelled(config: TrainConfig) -> LabelledCorpus:
    """The labelled sequences of `config`. Raises `ValueError` where batch.length is too short for them."""
    options = config.classify
    return toy(config.batch.length, examples=options.examples, held_out=options.held_out, seed=options.seed)


def classification_task(config: TrainConfig) -> Task:
    """The labelled sequences of `config`. Raises `ValueError` as `train` says."""
    from subquad.hf import SubquadClassifierConfig, SubquadForSequenceClassification

    options, corpus = config.classify, labelled(config)
    config = config.replace(model=fitted(config.model, corpus.vocab_size, "as the sequences have it"))
    encoder = config.encoder(len(corpus.classes))
    return Task(
        config=config,
        data=corpus,
        train=corpus.train,
        count=options.examples,
        held_out=spread(corpus.held_out, options.held_out, config.run.eval_windows),
        make_model=lambda: SubquadForSequenceClassification(
            SubquadClassifierConfig.from_encoder(encoder, classes=corpus.classes)
        ),
        identity={"task": "classify", "pooling": options.pooling, "data": corpus.fingerprint},
        measure=_accuracy,
    )


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}
