"""Measure a trained model on held-out data: losses in blocks, accuracies in blocks, and trivial baselines.

Shape letters: N scored tokens or examples, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import numpy as np
from torch.utils.data import Subset

from experiments.harness.noise import Row
from experiments.harness.recipe import Held
from subquad.config import digest
from subquad.data import Corpus
from subquad.data.labelled import LabelledCorpus
from subquad.evaluation.classes import evaluate_classifier
from subquad.evaluation.text import Tokens, batches, losses, plan
from subquad.train_and_report import report_run
from subquad.training import RunResult

BLOCKS, COUNTED = 100, 3_000_000
"""Most blocks of held-out data in a row, and training tokens that the unigram counts."""


def held_out(result: RunResult, held: Held) -> Row:
    """Measure the model on held-out data with the metrics of its task, and a trivial baseline."""
    if result.config.reads_text:
        return measure_text(result, held)
    report_run(result)
    found = json.loads((result.folder / "evaluation.json").read_text(encoding="utf-8"))
    names = ("accuracy", "error", "chance", "constant", "bag_of_tokens", "loss", "bits_per_dim")
    row = {name: found[name] for name in names if name in found}
    return row | measure_classes(result) if isinstance(result.corpus, LabelledCorpus) else row


def measure_classes(result: RunResult) -> Row:
    """Return chance and the accuracy in blocks of a classifier's test sequences.

    The sequences are dealt to the blocks at random, the same for all models: in a file sorted by class, contiguous
    blocks would differ by class, which is not an error of the test set's mean.
    """
    corpus: Any = result.corpus  # Any, since torch's Dataset type has no length
    dealt = np.random.default_rng(0).permutation(len(corpus.test))
    parts = np.array_split(dealt, min(BLOCKS, len(dealt)))
    right = [
        evaluate_classifier(
            result.model.model,
            Subset(corpus.test, part.tolist()),
            len(part),
            corpus.classes,
            batch_size=result.config.batch.size,
        ).accuracy
        for part in parts
    ]
    blocks = {"accuracy_blocks": [round(value, 4) for value in right], "block_size": len(parts[0])}
    return {"chance": 1 / len(corpus.classes), "text": corpus.fingerprint[:8], **blocks}


def measure_text(result: RunResult, held: Held) -> Row:
    """Return nats per token, bits per byte, and perplexity per token and per word on the held-out text.

    `unigram` (nats per token) and `gzip` (bits per byte) are trivial baselines on the same tokens.
    """
    assert isinstance(result.corpus, Corpus)
    shard, tokenizer = result.corpus.held_out, result.corpus.tokenizer
    tokens = shard.tokens[: held.tokens]
    nats_N = token_nats(result, tokens, held)
    scored_N = np.asarray(tokens[-len(nats_N) :], dtype=np.int64)
    scored, nats = tokenizer.decode(scored_N.tolist()), float(nats_N.sum())
    size, words = len(scored.encode()), len(scored.split())
    if len(tokens) == len(shard) and not held.skip:  # a code for the whole text, which charges the first token
        nats += math.log(result.config.model.vocab_size)
        size, words = shard.text_bytes or size, shard.words or words
    loss = float(nats_N.mean())
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "word_perplexity": math.exp(min(nats / max(1, words), 700.0)),
        "bits_per_byte": nats / math.log(2) / size,
        "unigram": unigram(np.asarray(result.corpus.train.tokens[:COUNTED]), scored_N, result.corpus.train.vocab_size),
        "gzip": 8 * len(zlib.compress(scored.encode(), 9)) / len(scored.encode()),
        "scored_tokens": len(nats_N),
        "text": digest(scored_N.tolist())[:8],
        **in_blocks("loss", nats_N),
    }


def token_nats(result: RunResult, tokens: Tokens, held: Held) -> np.ndarray:
    """Return the nats `[N]` of the scored tokens in the text's order, in the windows of `subquad.evaluation.evaluate`.

    Raises `ValueError` if the windows leave out tokens or none is left to score.
    """
    model, length = result.decoder, held.length or result.config.batch.length
    latents = model.predicts_last
    most = length if latents is None else min(length, latents)
    stride = held.stride or most
    windows = [window for window in plan(len(tokens), length, stride, latents) if window.scored > held.skip]
    if stride > most or not windows:
        raise ValueError(
            f"held.stride must be at most {most}, the predictions of a window, and held.skip leave some of the "
            f"{len(tokens)} tokens; got {held.stride} and {held.skip}"
        )
    nats = []
    for batch in batches(windows, result.config.batch.size):
        for window, nats_T in zip(batch, losses(model, tokens, batch), strict=True):
            nats.append(nats_T[len(nats_T) - (window.stop + 1 - window.scored) :])
    return np.concatenate(nats)


def in_blocks(metric: str, values_N: np.ndarray) -> Row:
    """Return the columns of a metric's means over at most `BLOCKS` blocks of contiguous values, all of one size."""
    size = -(-len(values_N) // BLOCKS)
    whole = len(values_N) // size * size
    means = values_N[:whole].reshape(-1, size).mean(1)
    return {f"{metric}_blocks": [round(float(value), 4) for value in means], "block_size": size}


def unigram(train_N: np.ndarray, held_N: np.ndarray, tokens: int) -> float:
    """Return the mean nats of the held-out tokens by their shares of the training tokens, each counted once more."""
    count_V = np.bincount(train_N, minlength=tokens) + 1
    return float(-np.log(count_V[held_N] / count_V.sum()).mean())
