"""What a probe of memory asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from subquad.data.probes import IGNORED, ProbeCorpus
from subquad.models.stacks import options_of
from subquad.training._task import Task, fitted, spread
from subquad.training._task_language import window_labels
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import EvalPrediction


def check_probe(config: TrainConfig) -> None:
    """Raise `ValueError` for a model that predicts its last tokens alone, where the probe asks for earlier ones."""
    fewest = options_of(config.model).fewest_predicted
    if fewest is None:
        return
    window_labels(config)
    first = config.probe.first_asked(config.batch.length)
    needed = config.batch.length - first + 1
    if fewest < needed:
        raise ValueError(
            f"{config.model.attention} predicts with its last {fewest} tokens at least, and {config.probe.name} asks "
            f"from place {first} of {config.batch.length} on: {needed} latents are needed "
            "(model.options.perceiver_ar.latents)"
        )


def probe_task(config: TrainConfig) -> Task:
    """The sequences of the probe of `config`. Raises `ValueError` as `train` says."""
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    check_probe(config)
    corpus = ProbeCorpus.of(config.probe, config.batch.length)
    config = config.replace(model=fitted(config.model, config.probe.vocab_size, "as the probe has it"))
    return Task(
        config=config,
        data=corpus,
        train=corpus.train,
        count=len(corpus.train),
        held_out=spread(corpus.held_out, len(corpus.held_out), config.run.eval_windows),
        make_model=lambda: SubquadForCausalLM(SubquadConfig.from_decoder(config.model)),
        identity={"task": "probe", "data": corpus.fingerprint},
        measure=_answers,
    )


def _answers(prediction: EvalPrediction) -> dict[str, float]:
    """The share of the asked tokens that were predicted, from the likeliest tokens `[B, T]` and the labels."""
    predicted_BT = np.asarray(prediction.predictions)[:, :-1]
    labels_BT = np.asarray(prediction.label_ids)[:, -predicted_BT.shape[1] :]
    asked_BT = labels_BT != IGNORED
    return {"accuracy": float((predicted_BT == labels_BT)[asked_BT].mean())}
