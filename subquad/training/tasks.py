"""What a run learns, prepared: the next token of a text, the labels of sequences, or what a probe asks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset

from subquad.attention import mechanism, names
from subquad.config import digest, suggest
from subquad.data import Corpus, Windows, prepare
from subquad.data.labelled import LabelledCorpus
from subquad.data.probe_items import ProbeCorpus
from subquad.data.probes import IGNORED
from subquad.data.tokenizers import separator_id
from subquad.data.toy import toy
from subquad.models.config import DecoderConfig
from subquad.models.perceiver_options import PerceiverAROptions
from subquad.models.stacks import STACKS
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import EvalPrediction

    from subquad.hf import SubquadForCausalLM, SubquadForSequenceClassification

logger = logging.getLogger(__name__)

Items = Dataset[dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """The data of a run and what follows from it."""

    config: TrainConfig
    """The run's configuration with what the data decides filled in."""
    data: Corpus | LabelledCorpus | ProbeCorpus
    train: Items
    count: int
    """Items in `train`."""
    held_out: Items
    """The items of the periodic evaluation: always the same."""
    make_model: Callable[[], SubquadForCausalLM | SubquadForSequenceClassification]
    """Make the model, with first weights from the present random numbers."""
    identity: dict[str, Any]
    """What must stay the same for a run to go on, beside the configuration."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What the run's folder keeps, by name."""
    measure: Callable[[EvalPrediction], dict[str, float]] | None = None
    """Numbers beside the loss, from the logits and labels of the periodic evaluation."""


def check_forms(config: TrainConfig) -> None:
    """Raise `ValueError` for an unknown mechanism or stack and for one that has not the form that the task needs."""
    needed, other, task = ("bidirectional", "causal", "language")
    if config.task != "classify":
        needed, other, task = ("causal", "bidirectional", "classify")
    valid = {*names(), *STACKS}
    for name in config.model.mechanisms:
        if name not in valid:
            raise ValueError(f"unknown attention {name!r}; {suggest(name, valid)}")
        forms = STACKS[name].forms if name in STACKS else mechanism(name).forms
        if needed not in forms:
            raise ValueError(
                f"attention {name!r} has no {needed} form, which --task {config.task} needs; its {other} form is for "
                f"--task {task}"
            )


def window_labels(config: TrainConfig) -> int:
    """Tokens of a window that a language model predicts, its last ones: all but the first, or for `perceiver_ar` all
    latents but the first (with `vary_latents` of the fewest latents). As many tokens lie between two windows.

    Raises `ValueError` where there would be none, and where `perceiver_ar` would have no history.
    """
    length = config.batch.length
    if "perceiver_ar" not in config.model.mechanisms:
        return length - 1
    given = config.model.options.get("perceiver_ar", {})
    options = PerceiverAROptions.from_dict(given, where="model.options.perceiver_ar")
    if length <= options.latents:
        raise ValueError(
            f"perceiver_ar would have no history: batch.length={length} must be above its latents={options.latents}; "
            "give longer windows (batch.length) or fewer latents (model.options.perceiver_ar.latents)"
        )
    if options.fewest_latents < 2:
        raise ValueError(
            f"perceiver_ar needs at least {3 if options.vary_latents else 2} latents to train"
            f"{' with vary_latents' if options.vary_latents else ''}, got {options.latents}: what a window's last "
            "latent predicts lies after the window"
        )
    return options.fewest_latents - 1


def prepare_task(config: TrainConfig, console: Console | None) -> Task:
    """Read or make the data of `config`. Raises `ValueError` as `train` says."""
    check_forms(config)
    if config.task == "language":
        return _language(config, console)
    return _classification(config) if config.task == "classify" else _probe(config)


def labelled(config: TrainConfig) -> LabelledCorpus:
    """The labelled sequences of `config`. Raises `ValueError` where batch.length is too short for them."""
    options = config.classify
    return toy(config.batch.length, examples=options.examples, held_out=options.held_out, seed=options.seed)


def _language(config: TrainConfig, console: Console | None) -> Task:
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    labels = window_labels(config)
    corpus = _corpus(config, console)
    config = config.replace(model=_fitted(config.model, corpus.train.vocab_size, "as the tokenizer has it"))
    for name, shard in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(shard) < config.batch.length:
            raise ValueError(
                f"batch.length {config.batch.length} is longer than the {name} part of the text, which has "
                f"{len(shard)} tokens; give more text or shorter windows"
            )
    windows, held_out = (
        Windows(shard, config.batch.length, stride=labels) for shard in (corpus.train, corpus.held_out)
    )
    if labels < config.batch.length - 1:
        count = config.step_tokens // config.batch.length
        logger.info(
            "perceiver_ar predicts the last %d tokens of each window of %d: %d of the %d tokens that a step reads; "
            "windows begin %d tokens apart", labels, config.batch.length, count * labels, config.step_tokens, labels,
        )  # fmt: skip
    end = separator_id(corpus.tokenizer)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return Task(
        config=config,
        data=corpus,
        train=windows,
        count=len(windows),
        held_out=_spread(held_out, len(held_out), config.run.eval_windows),
        make_model=lambda: SubquadForCausalLM(SubquadConfig.from_decoder(config.model, eos_token_id=end)),
        identity={
            "data": digest([corpus.fingerprint, corpus.train_files, len(corpus.train)]),
            "tokenizer": digest(corpus.tokenizer.to_str()),
        },
        files={
            "tokenizer.json": corpus.tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(tokenizer).encode(),
        },
    )


def _classification(config: TrainConfig) -> Task:
    from subquad.hf import SubquadClassifierConfig, SubquadForSequenceClassification

    options, corpus = config.classify, labelled(config)
    config = config.replace(model=_fitted(config.model, corpus.vocab_size, "as the sequences have it"))
    encoder = config.encoder(len(corpus.classes))
    return Task(
        config=config,
        data=corpus,
        train=corpus.train,
        count=options.examples,
        held_out=_spread(corpus.held_out, options.held_out, config.run.eval_windows),
        make_model=lambda: SubquadForSequenceClassification(
            SubquadClassifierConfig.from_encoder(encoder, classes=corpus.classes)
        ),
        identity={"task": "classify", "pooling": options.pooling, "data": corpus.fingerprint},
        measure=_accuracy,
    )


def check_probe(config: TrainConfig) -> None:
    """Raise `ValueError` for a `perceiver_ar` whose latents do not reach back to all that the probe asks."""
    if "perceiver_ar" not in config.model.mechanisms:
        return
    window_labels(config)
    given = config.model.options.get("perceiver_ar", {})
    fewest = PerceiverAROptions.from_dict(given, where="model.options.perceiver_ar").fewest_latents
    first = config.probe.first_asked(config.batch.length)
    needed = config.batch.length - first + 1
    if fewest < needed:
        raise ValueError(
            f"perceiver_ar predicts with its last {fewest} tokens at least, and {config.probe.name} asks from place "
            f"{first} of {config.batch.length} on: {needed} latents are needed (model.options.perceiver_ar.latents)"
        )


def _probe(config: TrainConfig) -> Task:
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    check_probe(config)
    corpus = ProbeCorpus.of(config.probe, config.batch.length)
    config = config.replace(model=_fitted(config.model, config.probe.vocab_size, "as the probe has it"))
    return Task(
        config=config,
        data=corpus,
        train=corpus.train,
        count=len(corpus.train),
        held_out=_spread(corpus.held_out, len(corpus.held_out), config.run.eval_windows),
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


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def _fitted(model: DecoderConfig, size: int, source: str) -> DecoderConfig:
    """The model with the data's vocabulary."""
    if size != model.vocab_size:
        logger.info("model.vocab_size is %d, %s (it was %d)", size, source, model.vocab_size)
    return model.replace(vocab_size=size)


def _spread(items: Items, size: int, wanted: int) -> Items:
    """`wanted` items, evenly spread over all `size` of them (all where there are fewer)."""
    count = min(wanted, size)
    return Subset(items, [i * size // count for i in range(count)])


def _corpus(config: TrainConfig, console: Console | None) -> Corpus:
    """The corpus; the console hears what is being done, as it may take a while the first time."""
    if console is None:
        return prepare(config.data)
    with console.status("preparing the text") as status:
        said = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal said
            status.update(f"{what}: {done:,} of {total:,}")
            if what != said and not console.is_terminal:
                console.print(what, highlight=False)
            said = what

        return prepare(config.data, progress=show)
