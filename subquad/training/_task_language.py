"""The next token of a text."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from subquad.config import digest
from subquad.data import Corpus, TokenSet, TokenShard, prepare
from subquad.data.tokenizers import encode_text, separator_id
from subquad.data.windows import PackedSetWindows, PackedWindows, SetWindows, Windows, windows_of
from subquad.models.stacks import options_of
from subquad.training._task import Task, fitted, preparing, spread
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


def window_labels(config: TrainConfig) -> int:
    """Tokens of a window that a language model predicts, its last ones: all but the first, or for `perceiver_ar` all
    latents but the first (with `vary_latents` of the fewest latents). As many tokens lie between two windows.

    Raises `ValueError` where there would be none, and where `perceiver_ar` would have no history.
    """
    return options_of(config.model).window_labels(config.batch.length)


def language_task(config: TrainConfig, console: Console | None) -> Task:
    """Read, split and cut the text of `config` into windows. Raises `ValueError` as `train` says."""
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    labels = window_labels(config)
    if config.data.pack == "documents" and options_of(config.model).fewest_predicted is not None:
        raise ValueError(
            f"{config.model.attention} predicts a window's last tokens alone and takes no packed documents: set "
            "data.pack=stream"
        )
    corpus = preparing(console, "text", lambda progress: prepare(config.data, progress=progress))
    _check_prompt(corpus, config.run.prompt)
    config = config.replace(model=fitted(config.model, corpus.train.vocab_size, "as the tokenizer has it"))
    for name, shard in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(shard) < config.batch.length:
            raise ValueError(
                f"batch.length {config.batch.length} is longer than the {name} part of the text, which has "
                f"{len(shard)} tokens; give more text or shorter windows"
            )
    windows, held_out = (_windows(part, config, labels, console) for part in (corpus.train, corpus.held_out))
    if labels < config.batch.length - 1:
        count = config.step_tokens // config.batch.length
        logger.info(
            "%s predicts the last %d tokens of each window of %d: %d of the %d tokens that a step reads; windows begin "
            "%d tokens apart", config.model.attention, labels, config.batch.length, count * labels, config.step_tokens,
            labels,
        )  # fmt: skip
    end = separator_id(corpus.tokenizer)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return Task(
        config=config,
        data=corpus,
        train=windows,
        count=len(windows),
        held_out=spread(held_out, len(held_out), config.run.eval_windows),
        make_model=lambda: SubquadForCausalLM(SubquadConfig.from_decoder(config.model, eos_token_id=end)),
        identity={
            "data": digest([corpus.fingerprint, corpus.train_files, len(corpus.train)]),
            "tokenizer": digest(corpus.tokenizer.to_str()),
            **({} if config.data.pack == "stream" else {"data.pack": config.data.pack, "windows": len(windows)}),
        },
        files={
            "tokenizer.json": corpus.tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(tokenizer).encode(),
        },
    )


def _windows(
    tokens: TokenShard | TokenSet, config: TrainConfig, labels: int, console: Console | None
) -> Windows | PackedWindows | SetWindows:
    """The windows of one part of the text."""
    length, data = config.batch.length, config.data
    if data.pack == "stream":
        return windows_of(tokens, length, stride=labels)
    windows = preparing(
        console,
        "windows",
        lambda progress: windows_of(tokens, length, pack="documents", cache=data.cache, progress=progress),
    )
    assert isinstance(windows, PackedWindows | PackedSetWindows)
    logger.info(
        "%s: %d windows of whole documents, %.2f %% of their places are padding",
        tokens.path, len(windows), 100 * windows.padding,
    )  # fmt: skip
    return windows


def _check_prompt(corpus: Corpus, prompt: str) -> None:
    """Raise `ValueError` for a prompt of the final samples that the tokenizer has no tokens for."""
    try:
        tokens = encode_text(corpus.tokenizer, prompt)
    except ValueError as error:
        raise ValueError(f"run.prompt={prompt!r}: {error}; give the samples another prompt") from error
    if not tokens:
        raise ValueError(f"run.prompt={prompt!r} holds no token of this tokenizer; give the samples another prompt")
