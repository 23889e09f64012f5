"""Measure the time of one decoded token after contexts of several lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.config import DecodeConfig
from benchmarks.measuring import OUT_OF_TIME, Progress, check_there, statistics_of, status_of
from benchmarks.models import build_decoder, check_models, label_of
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Run, Timing, attempt, interleave, wall_clock
from subquad.evaluation.provenance import provenance
from subquad.models import Decoder
from subquad.state import State

MOST = 200
"""Most repeats: a token takes milliseconds."""
WARM, BEFORE = 0.03, 100
"""Untimed decoding before each timed token: seconds, and most tokens. Without it, the case after one that has read
128 MiB of keys and values is slower for some milliseconds."""


class Read(NamedTuple):
    """A model, its state after a context, and the seconds that reading the context took."""

    model: Decoder
    state: State
    seconds: float


def check_decode(config: DecodeConfig) -> None:
    """Raise `ValueError` or `TypeError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, config.options, stacks=False)
    with torch.device("meta"):
        for name in config.mechanisms:
            _build(config, name)


def measure_decode(
    config: DecodeConfig | None = None,
    /,
    *,
    shown: bool = False,
    deadline: float | None = None,
    found: Callable[[Report], None] | None = None,
    command: str = "",
) -> Report:
    """Measure the time of one token after each context, its ratio to the shortest context, and the state's bytes.

    The context is read in pieces; then the same next token is decoded from the same state in every repeat, so the
    context keeps its length. Repeats of all mechanisms and contexts are interleaved. A time runs from call to logits,
    launches included, since a decoder waits for each token. Weights are cast to the dtype. Other arguments and the
    treatment of failures are as in `measure_ops`.
    """
    config = DecodeConfig() if config is None else config
    check_decode(config)
    origin = provenance(config.device)
    contexts = [(name, tokens) for name in config.mechanisms for tokens in sorted(config.contexts)]
    reads: dict[tuple[str, int], Read | Failure] = {}

    def report(times: dict[tuple[str, int], Timing | Failure]) -> Report:
        rows = [_row(config, *key, reads.get(key, OUT_OF_TIME), times) for key in contexts]
        return Report("decode", config.to_dict(), rows, origin, command=command)

    with Progress(len(contexts) + 1, shown=shown) as progress:
        models: dict[str, Decoder | Failure] = {}
        for name, tokens in contexts:
            progress.step(f"{name} reads {tokens:,} tokens")
            if deadline is not None and time.monotonic() > deadline:
                continue
            if name not in models:
                models[name] = attempt(_ready, config, name)
            model = models[name]
            reads[name, tokens] = model if isinstance(model, Failure) else attempt(_read, config, model, tokens)
        progress.step("one token")
        # Order by context, so that consecutive cases use different models.
        turns = sorted(reads.items(), key=lambda item: item[0][1])
        runs = {key: _step(config, read) for key, read in turns if isinstance(read, Read)}
        times = interleave(runs, clock=wall_clock, repeats=config.repeats, seconds=config.seconds, most=MOST)
    result = report(times)
    if found is not None:
        found(result)
    return result


def _build(config: DecodeConfig, name: str) -> Decoder:
    longest = max(config.contexts) + BEFORE + 1
    return build_decoder(name, longest=longest, options=config.options, **config.sizes)


def _ready(config: DecodeConfig, name: str) -> Decoder:
    return _build(config, name).eval().to(config.device, getattr(torch, config.dtype))


def _tokens(config: DecodeConfig, tokens: int) -> Tensor:
    numbers_BT = torch.randint(config.vocab, (config.batch, tokens), generator=torch.Generator().manual_seed(0))
    return numbers_BT.to(config.device)


@torch.no_grad()
def _read(config: DecodeConfig, model: Decoder, tokens: int) -> Read:
    """Read the context. A first call on one piece warms up, so that the measured time contains no compilation."""
    numbers_BT, state = _tokens(config, tokens), None
    model(numbers_BT[:, : min(config.piece, tokens)])
    start = time.perf_counter()
    for first in range(0, tokens, config.piece):
        _, state = model.hidden(numbers_BT[:, first : first + config.piece], state)
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    assert state is not None
    return Read(model, state, time.perf_counter() - start)


def _step(config: DecodeConfig, read: Read) -> Run:
    """Return the timed call: one token after untimed ones (`WARM`, `BEFORE`), which bring the weights into cache.

    The first untimed token also makes a growing cache reserve room; the timed one continues from the last.
    """
    token_B1 = _tokens(config, 1)

    @torch.no_grad()
    def step(state: State) -> tuple[Tensor, State]:
        logits_B1V, state = read.model(token_B1, state)
        return logits_B1V, state

    def steps() -> State:
        state, start = step(read.state)[1], time.perf_counter()
        for _ in range(BEFORE - 1):
            if time.perf_counter() - start > WARM:
                break
            state = step(state)[1]
        return state

    return Run(step, before=steps)


def _row(
    config: DecodeConfig, name: str, tokens: int, read: Read | Failure, times: dict[tuple[str, int], Timing | Failure]
) -> Row:
    result = read if isinstance(read, Failure) else times[name, tokens]
    row: dict[str, Any] = {
        "name": name,
        "label": label_of(name, config.options),
        "kind": "ours",
        "tokens": tokens,
        "batch": config.batch,
        "pass": "token",
        **status_of(result),
    }
    if isinstance(read, Failure) or not isinstance(result, Timing):
        return row
    shortest = times.get((name, min(config.contexts)))
    return {
        **row,
        **statistics_of(result),
        "of_shortest": result.median / shortest.median if isinstance(shortest, Timing) else None,
        "state_bytes": read.state.nbytes,
        "prefill_tokens_per_s": config.batch * tokens / read.seconds,
    }
