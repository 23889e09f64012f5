"""Language-model tasks: predict the next token of a text, and answer a memory probe."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Subset

from subquad.config import digest
from subquad.data import TokenSet, TokenShard, prepare
from subquad.data.probes import IGNORED, ProbeCorpus
from subquad.data.sources import check_source
from subquad.data.special_tokens import CONFIG, log_separator, token_id, tokenizer_config
from subquad.data.tokenizers import encode_text, warn_of_carriage_returns
from subquad.data.windows import PackedSetWindows, PackedWindows, SetWindows, Windows, windows_of
from subquad.models.build import build_model
from subquad.models.stacks import options_of
from subquad.ops.precision import at_least_float32
from subquad.training.config import TrainConfig
from subquad.training.memory import check_fits
from subquad.training.task import Batch, Task, count_items, fitted, preparing, rows, spread

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """Predict the next token of a text."""

    special: dict[str, int | None]
    """The end token and the padding token, for the model's configuration."""

    @classmethod
    def check_source(cls, config: TrainConfig) -> None:
        for path in (config.data.path, config.data.held_out_path):
            if path is not None:
                check_source(path)

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise `ValueError` or `TypeError` for a model that can't be built, or trained on windows of batch.length."""
        with torch.device("meta"):
            check_fits(build_model(config.model), config)
        options_of(config.model).window_labels(config.batch.length)

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        options = options_of(config.model)
        labels = options.window_labels(config.batch.length)
        if config.data.pack == "documents" and options.fewest_predicted is not None:
            raise ValueError(
                f"{config.model.attention} predicts only a window's last tokens and can't train on packed documents: "
                "set data.pack=stream"
            )
        corpus = preparing(console, "text", lambda progress: prepare(config.data, progress=progress))
        check_prompt(corpus.tokenizer, config.run.prompt)
        config = config.replace(model=fitted(config.model, corpus.train.vocab_size, "as in the tokenizer"))
        size = options.window_tokens(config.batch.length)
        for name, shard in (("training", corpus.train), ("held-out", corpus.held_out)):
            if len(shard) < size:
                raise ValueError(
                    f"batch.length={config.batch.length} takes windows of {size} tokens, but the {name} part of the "
                    f"text has {len(shard)}; give more text or shorter windows"
                )
            if isinstance(shard, TokenShard):  # checking a TokenSet would open all its shards
                warn_of_carriage_returns(corpus.tokenizer, shard.tokens, f"the {name} part of the text")
        windows, held_out = (_windows(part, config, size, labels, console) for part in (corpus.train, corpus.held_out))
        if options.fewest_predicted is not None:
            count = config.step_tokens // config.batch.length * labels
            logger.info(
                "%s predicts the last %d tokens of each window of %d: %d in a step that reads %d; windows start "
                "%d tokens apart",
                *(config.model.attention, labels, size, count, config.step_tokens, labels),
            )
        log_separator(corpus.tokenizer)
        return cls(
            config=config,
            data=corpus,
            train=windows,
            held_out=spread(_chosen_on(held_out, config), config.run.eval_windows),
            special={f"{name}_id": token_id(corpus.tokenizer, name) for name in ("eos_token", "pad_token")},
            identity={
                **corpus.identity,
                "tokenizer": digest(corpus.tokenizer.to_str()),
                **({} if config.data.pack == "stream" else {"data.pack": config.data.pack, "windows": len(windows)}),
                **({} if options.fewest_predicted is None else {"labels": labels}),
            },
            files={
                "tokenizer.json": corpus.tokenizer.to_str(pretty=True).encode(),
                CONFIG: json.dumps(tokenizer_config(corpus.tokenizer)).encode(),
            },
        )

    def new_model(self) -> Any:
        return _language_model(self.config, **self.special)

    @property
    def packed(self) -> bool:
        """Whether windows hold whole documents, and so different numbers of labels."""
        return self.config.data.pack == "documents"

    def count_labels(self, batch: Batch) -> Tensor | None:
        """Return the number of labels in packed documents; windows of a stream all have equally many (None)."""
        return (batch["labels"][..., 1:] != IGNORED).sum() if self.packed else None

    def loss(self, model: Any, batch: Batch, labels: Tensor | None) -> Tensor:
        """Return the mean loss, or the sum over the batch divided by the step's `labels`."""
        named = {} if labels is None else {"num_items_in_batch": labels}
        return model(**batch, **named, return_logits=False).loss

    def held_out_size(self, size: int) -> int:
        """Return 1 for packed documents, because a batch's mean loss would depend on how windows are grouped."""
        return 1 if self.packed else size

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return only the loss, because logits of long texts need much memory."""
        return {"loss": rows(model(**batch, return_logits=False, use_cache=False).loss, batch)}

    @staticmethod
    def window_bytes(config: TrainConfig, length: int) -> float | None:
        """Return the activation bytes of a window of `length` tokens."""
        with torch.device("meta"):
            model: Any = build_model(config.model)
        return model.cost(length).activation_bytes


@dataclass(frozen=True, kw_only=True)
class ProbeTask(Task):
    """Predict the asked tokens of a probe's sequences."""

    unit: ClassVar[str] = "asked token"

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise like `LanguageTask.check`, and `ValueError` for a model that can't predict all asked tokens."""
        with torch.device("meta"):
            check_fits(build_model(config.model), config)
        check_probe(config)

    @classmethod
    def prepare(cls, config: TrainConfig, console: Console | None) -> Self:
        check_probe(config)
        corpus = ProbeCorpus.of(config.probe, config.batch.length)
        config = config.replace(model=fitted(config.model, config.probe.vocab_size, "as in the probe"))
        return cls(
            config=config,
            data=corpus,
            train=corpus.train,
            held_out=spread(corpus.held_out, config.run.eval_windows),
            identity={"task": "probe", "data": corpus.fingerprint},
        )

    def new_model(self) -> Any:
        return _language_model(self.config)

    def loss(self, model: Any, batch: Batch, labels: Tensor | None) -> Tensor:
        """Return the mean loss of the asked tokens."""
        return model(**batch, return_logits=False).loss

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and for each sequence the numbers of asked and of correctly predicted tokens."""
        logits_BMV = model(batch["input_ids"][:, :-1], use_cache=False).logits
        labels_BM = batch["labels"][:, -logits_BMV.shape[1] :]
        loss = F.cross_entropy(at_least_float32(logits_BMV).flatten(0, 1), labels_BM.flatten(), ignore_index=IGNORED)
        asked_BM = labels_BM != IGNORED
        right_BM = (logits_BMV.argmax(-1) == labels_BM) & asked_BM
        return {"loss": rows(loss, batch), "right": right_BM.sum(-1), "asked": asked_BM.sum(-1)}

    def measure(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        return {**super().measure(values), "eval_accuracy": float(values["right"].sum() / values["asked"].sum())}

    window_bytes = staticmethod(LanguageTask.window_bytes)


def _language_model(config: TrainConfig, **special: int | None) -> Any:
    """Return a new language model; `special` are the `eos_token_id` and `pad_token_id` of its configuration."""
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    return SubquadForCausalLM(SubquadConfig.from_decoder(config.model, **special))


def check_prompt(tokenizer: Tokenizer, prompt: str | None) -> None:
    """Raise `ValueError` for a prompt of the samples that the tokenizer can't read."""
    if prompt is None:
        return
    try:
        tokens = encode_text(tokenizer, prompt)
    except ValueError as error:
        raise ValueError(f"run.prompt={prompt!r}: {error}; choose another prompt for the samples") from error
    if not tokens:
        raise ValueError(f"run.prompt={prompt!r} holds no token of this tokenizer; choose another prompt")


def reported_from(config: TrainConfig, tokens: int) -> int:
    """Return the index of the report's first held-out token: with run.weights=best earlier ones choose the weights."""
    return tokens // 2 if config.run.weights == "best" else 0


def _chosen_on(windows: Any, config: TrainConfig) -> Any:
    """Return the held-out windows of the periodic evaluation: the first half if they choose the weights."""
    count = count_items(windows)
    return Subset(windows, range(count // 2)) if config.run.weights == "best" and count > 1 else windows


def _windows(
    tokens: TokenShard | TokenSet, config: TrainConfig, length: int, labels: int, console: Console | None
) -> Windows | PackedWindows | SetWindows:
    """Cut the text `tokens` into windows of `length` tokens with `labels` predicted tokens each."""
    data = config.data
    if data.pack == "stream":
        return windows_of(tokens, length, stride=labels)
    windows = preparing(
        console,
        "windows",
        lambda progress: windows_of(tokens, length, pack="documents", cache=data.cache, progress=progress),
    )
    assert isinstance(windows, PackedWindows | PackedSetWindows)
    logger.info(
        "%s: %d windows of whole documents, %.2f %% padding",
        tokens.path, len(windows), 100 * windows.padding,
    )  # fmt: skip
    return windows


def check_probe(config: TrainConfig) -> None:
    """Raise `ValueError` if the probe asks for tokens before those that the model predicts."""
    options = options_of(config.model)
    fewest = options.fewest_predicted
    if fewest is None:
        return
    options.window_labels(config.batch.length)
    first = config.probe.first_asked(config.batch.length)
    needed = config.batch.length - first
    if fewest < needed:
        raise ValueError(
            f"{config.model.attention} may predict only the last {fewest} tokens, but {config.probe.name} asks from "
            f"place {first} of {config.batch.length} on: every step needs {needed} latents "
            "(model.options.perceiver_ar.latents)"
        )
