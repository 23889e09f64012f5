"""LoRA runs: train low-rank factors in a frozen, previously trained model."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.data import Corpus, load_tokenizer
from subquad.data.tokenizers import tokenizer_hash
from subquad.hf import SubquadConfig, lora
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.hf.image import SubquadImageConfig
from subquad.models.config import DecoderConfig
from subquad.training.config import TrainConfig
from subquad.training.runs import tokenizer_folder
from subquad.training.task import Adapter, Task

logger = logging.getLogger(__name__)


def _with_factors(config: TrainConfig, base: lora.Base, classes: list[str] | None) -> Any:
    """Return the base with new factors from the current random state, and a new head if `classes` are given."""
    options, folder = config.lora, _folder(config)
    model = lora.load_base(folder, classes)
    adapted = lora.add_adapter(
        model,
        rank=options.rank,
        alpha=options.alpha,
        dropout=options.dropout,
        wanted=options.targets,
        dora=options.dora,
        rslora=options.rslora,
        train_head=options.train_head or classes is not None,
        base=base,
    )
    trains, every = lora.counts(adapted)
    logger.info("%d of %d parameters train (%.2f %%); %s stays frozen", trains, every, 100 * trains / every, folder)
    return model


def with_base(config: TrainConfig) -> TrainConfig:
    """Return `config` with the base's model and tokenizer; unchanged without `lora.rank`.

    Raises `FileNotFoundError` if there is no base, and `ValueError` for a base of another task and for model settings
    that are neither the defaults nor the base's.
    """
    if not config.lora.rank:
        return config
    lora.require_peft()
    folder = _folder(config)
    base = lora.base_config(folder)
    if Path(config.run.folder).resolve() == folder.resolve():
        raise ValueError(f"run.folder={config.run.folder!r} is the base's folder; choose another for the adapter")
    _check_kind(config, base)
    model = base.decoder_config()
    _check_same("model", config.model, DecoderConfig(), model.to_dict(), folder)
    changes: dict[str, Any] = {"model": model}
    for group in {"classify", "image"} & set(config.groups):
        given = getattr(config, group)
        own = {name: getattr(base, name) for name in base.own_fields if name in given.to_dict()}
        _check_same(group, given, type(given)(), own, folder)
        changes[group] = given.replace(**own)
    if config.reads_text and config.data.tokenizer == type(config.data)().tokenizer:
        changes["data"] = config.data.replace(tokenizer=str(tokenizer_folder(folder) / "tokenizer.json"))
    return config.replace(**changes)


def adapt(task: Task) -> Task:
    """Return `task` with factors in the base, and a head for other classes. Raises `ValueError` if they don't fit."""
    config, folder = task.config, _folder(task.config)
    options, base = config.lora, lora.base_config(folder)
    _check_vocabulary(task, base, folder)
    with torch.device("meta"):
        fresh: Any = task.make_model().config
    for name in fresh.own_fields:
        if name != "num_labels" and getattr(fresh, name) != getattr(base, name):
            raise ValueError(
                f"the base {folder} has {name}={getattr(base, name)!r}, but this task needs {getattr(fresh, name)!r}"
            )
    classes = None
    if "classify" in config.groups and fresh.id2label != base.id2label:
        classes = [fresh.id2label[number] for number in sorted(fresh.id2label)]
        logger.info(
            "the classes differ from the base's (%s): a new head for %d classes trains too",
            ", ".join((base.id2label or {}).values()), len(classes),
        )  # fmt: skip
    record = lora.Base.of(folder, classes)
    identity = {**task.identity, "lora": {**options.to_dict(), "base": record.weights}}
    adapter = Adapter(partial(_with_factors, config, record, classes), lora.save_adapter, lora.read_weights)
    return dataclasses.replace(task, adapter=adapter, identity=identity)


def _folder(config: TrainConfig) -> Path:
    assert config.lora.base is not None  # LoraConfig checks it
    return Path(config.lora.base)


def _check_kind(config: TrainConfig, base: SubquadConfig) -> None:
    """Raise `ValueError` for a base of another task."""
    kinds = {"classify": SubquadClassifierConfig, "image": SubquadImageConfig}
    if type(base) is not kinds.get(config.task, SubquadConfig):
        fits = [name for name, kind in kinds.items() if type(base) is kind] or ["language or --task probe"]
        raise ValueError(
            f"the base {config.lora.base} holds a model of type {base.model_type!r}, but the task is {config.task}; "
            f"give --task {fits[0]}"
        )
    if config.lora.train_head and "classify" not in config.groups:
        raise ValueError(f"lora.train_head is for classifiers, but the task is {config.task}; leave it out")


def _check_same(group: str, given: Any, default: Any, base: dict[str, Any], folder: Path) -> None:
    """Raise `ValueError` for a non-default setting that differs from the base's."""
    for name, value in base.items():
        asked = given.to_dict()[name]
        if asked != value and asked != default.to_dict()[name]:
            raise ValueError(
                f"{group}.{name}={asked!r} contradicts the base {folder}, which has {value!r}; leave it out"
            )


def _check_vocabulary(task: Task, base: SubquadConfig, folder: Path) -> None:
    size = task.config.model.vocab_size
    if size != base.vocab_size:
        raise ValueError(f"the base {folder} has a vocabulary of {base.vocab_size}, but the data one of {size}")
    file = tokenizer_folder(folder) / "tokenizer.json"
    if not isinstance(task.data, Corpus) or not file.is_file():
        return
    if tokenizer_hash(task.data.tokenizer) != tokenizer_hash(load_tokenizer(file)):
        raise ValueError(
            f"the tokenizer of the base {folder} differs from data.tokenizer={task.config.data.tokenizer!r}; leave it "
            "out"
        )
