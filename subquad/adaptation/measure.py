"""Measure the original and the result of each stage: loss, passkeys, speed, state size, branches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from subquad.adaptation.config import ConvertConfig
from subquad.adaptation.transfer import attention_errors, branched, silenced, without_branch
from subquad.data.probes import text_passkey
from subquad.evaluation import Evaluation, evaluate
from subquad.evaluation.probes import by_depth, right_answers
from subquad.models import Decoder


def measure(decoder: Decoder, held_out: np.ndarray, tokenizer: Tokenizer, config: ConvertConfig) -> dict[str, Any]:
    """Return the held-out loss, whole and by position, and the share of passkeys found."""
    return {**_loss(held_out_loss(decoder, held_out, config)), **passkeys(decoder, held_out, tokenizer, config)}


def held_out_loss(decoder: Decoder, held_out: np.ndarray, config: ConvertConfig) -> Evaluation:
    """Return the loss on the held-out windows."""
    length = config.batch.length
    return evaluate(decoder, held_out, length=length, windows=config.measure.windows, batch_size=config.batch.size)


def passkeys(decoder: Decoder, held_out: np.ndarray, tokenizer: Tokenizer, config: ConvertConfig) -> dict[str, Any]:
    """Return the share of keys answered in full with its standard error, or the reason why none was measured."""
    if not config.measure.passkeys:
        return {"passkey": None, "passkey_missing": "not asked for"}
    try:
        rows = text_passkey(
            tokenizer,
            held_out,
            config.batch.length,
            config.measure.passkeys,
            digits=config.measure.digits,
            seed=config.seed,
        )
    except ValueError as error:
        return {"passkey": None, "passkey_missing": str(error)}
    score = by_depth(rows, right_answers(decoder, rows, batch_size=config.batch.size), 0.0)
    return {"passkey": {"value": score.value, "error": score.error, "texts": score.sequences, "length": score.length}}


@torch.no_grad()
def decoding(decoder: Decoder, held_out: np.ndarray, config: ConvertConfig) -> list[dict[str, Any]]:
    """Return state bytes and tokens a second after each of `measure.contexts` for which the model has positions."""
    device, rows = next(decoder.parameters()).device, []
    for context in sorted(config.measure.contexts):
        if decoder.config.position == "learned" and context + config.measure.repeats >= decoder.config.max_positions:
            continue
        text = torch.from_numpy(np.resize(held_out, context + 1)).to(device)[None]
        state = None
        for piece in text[:, :context].split(512, 1):
            state = decoder.hidden(piece, state)[1]
        assert state is not None
        weighed = state.nbytes
        seconds: list[float] = []
        while len(seconds) <= config.measure.repeats:
            synchronise(device)
            begin = time.perf_counter()
            state = decoder(text[:, context:], state)[1]
            synchronise(device)
            seconds.append(time.perf_counter() - begin)
        median = float(np.median(seconds[1:]))  # the first pass warms up
        rows.append({"context": context, "state_bytes": weighed, "tokens_per_second": 1 / median})
    return rows


def synchronise(device: torch.device) -> None:
    """Wait until `device` has finished its work, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def matching(
    teacher: Decoder, student: Decoder, layers: Sequence[int], held_out: np.ndarray, config: ConvertConfig
) -> list[float]:
    """Return the relative error of each replaced layer on one batch of the first held-out windows."""
    length, device = config.batch.length, next(student.parameters()).device
    rows = min(config.batch.size, len(held_out) // length)
    tokens_BT = torch.from_numpy(held_out[: rows * length].reshape(rows, length).copy()).to(device)
    return [float(error) for error in attention_errors(teacher, student, layers, tokens_BT)]


def branches(
    decoder: Decoder, layers: Sequence[int], held_out: np.ndarray, config: ConvertConfig
) -> list[dict[str, Any]]:
    """Return the loss with one part off at a time: each branch, all replaced layers' and all kept layers' attention."""
    found = []
    for name, switch in _switches(decoder, layers):
        with switch:
            found.append({"off": name, **_loss(held_out_loss(decoder, held_out, config))})
    return found


def _switches(decoder: Decoder, layers: Sequence[int]) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    yield "nothing", nullcontext()
    for name in dict.fromkeys(name for module in branched(decoder) for name in module.branches):
        yield name, without_branch(decoder, name)
    mixers = [block.attention for block in decoder.blocks()]
    yield "replaced layers' attention", silenced([mixer for i, mixer in enumerate(mixers) if i in layers])
    kept = [mixer for i, mixer in enumerate(mixers) if i not in layers]
    if kept:
        yield "kept layers' attention", silenced(kept)


def _loss(found: Evaluation) -> dict[str, Any]:
    """Return the loss as plain values; a last range of a single position is merged into the range before it."""
    ranges = [
        {"start": part.start, "stop": part.stop, "tokens": part.tokens, "loss": part.loss} for part in found.by_position
    ]
    if len(ranges) > 1 and ranges[-1]["start"] == ranges[-1]["stop"] - 1:
        last, before = ranges.pop(), ranges[-1]
        tokens = before["tokens"] + last["tokens"]
        before["loss"] = (before["loss"] * before["tokens"] + last["loss"] * last["tokens"]) / tokens
        before |= {"stop": last["stop"], "tokens": tokens}
    return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens, "by_position": ranges}
