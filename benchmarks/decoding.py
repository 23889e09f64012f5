"""Decoders that have read a context, each in a form whose steps can be timed.

Forms of ours: the call; the recorded step, which `BatchDecoder` and long generations take; that step compiled, or
replayed from a CUDA graph.
Others: transformers' Llama and Qwen3.5 with their dynamic cache, and steps written by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.by_hand import ByHand
from benchmarks.config import DecodeConfig
from benchmarks.models import Llama
from benchmarks.peers import load
from subquad.generation.batch_state import StaticBatchState, row_of
from subquad.models import Decoder

ROOM = 101
"""Tokens that may follow the context."""


class Read(NamedTuple):
    """A decoder after a context."""

    begin: Callable[[], Any]
    """Returns the memory as it was after the context."""
    step: Callable[[Any], Any]
    """Reads a token: from a memory to the next one."""
    nbytes: int
    """Bytes of the memory."""
    seconds: float | None = None
    """Seconds that reading the context took."""


def tokens_of(config: DecodeConfig, tokens: int) -> Tensor:
    """Draw the tokens `[B, T]`."""
    numbers_BT = torch.randint(config.vocab, (config.batch, tokens), generator=torch.Generator().manual_seed(0))
    return numbers_BT.to(config.device)


@torch.no_grad()
def read(config: DecodeConfig, model: Decoder | Llama, tokens: int) -> Read:
    """Read the context in pieces. A first call on one warms up, so that the measured time contains no compilation."""
    numbers_BT, memory = tokens_of(config, tokens), None
    advance = model.prefill if isinstance(model, Llama) else model.hidden
    advance(numbers_BT[:, : min(config.piece, tokens)])
    if isinstance(model, Llama):
        memory = load("transformers").DynamicCache(config=model.config)
    start = time.perf_counter()
    for first in range(0, tokens, config.piece):
        memory = advance(numbers_BT[:, first : first + config.piece], memory)[1]
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds, token_B1 = time.perf_counter() - start, tokens_of(config, 1)
    if isinstance(model, Llama):
        return _llama(model, memory, token_B1, tokens, seconds)
    state: Any = memory
    return Read(lambda: state, torch.no_grad()(lambda state: model(token_B1, state)[1]), state.nbytes, seconds)


def _llama(model: Llama, cache: Any, token_B1: Tensor, tokens: int, seconds: float) -> Read:
    @torch.no_grad()
    def step(cache: Any) -> Any:
        return model.prefill(token_B1, cache)[1]

    held = tree_leaves([vars(layer) for layer in cache.layers])
    nbytes = sum(x.nbytes for x in held if isinstance(x, Tensor))
    return Read(lambda: model.taken_back(cache, tokens), step, nbytes, seconds)


def by_hand(config: DecodeConfig, model: Decoder, tokens: int) -> Read:
    """Return the step written by hand, which has read nothing: its time doesn't depend on what it remembers."""
    written, token_B1 = ByHand(model, config.batch, tokens), tokens_of(config, 1)
    return Read(lambda: None, lambda _: written.step(token_B1), written.nbytes)


def recorded(config: DecodeConfig, model: Decoder, tokens: int, plain: Read, *, compile: bool = False) -> Read:
    """Return the recorded step of a state of static shapes, which `BatchDecoder` and long generations take."""
    batch_state, begin = _batch_state(config, model, tokens, plain, compile=compile)
    numbers = tokens_of(config, 1)[:, 0].tolist()
    return Read(begin, torch.no_grad()(lambda _: batch_state.step(numbers)), batch_state.nbytes)


def captured(config: DecodeConfig, model: Decoder, tokens: int, plain: Read) -> Read:
    """Return the recorded step replayed from a CUDA graph. Raises `ValueError` if its logits aren't those of a call."""
    batch_state, begin = _batch_state(config, model, tokens, plain)
    token_B1 = tokens_of(config, 1)
    step = torch.no_grad()(lambda: batch_state.step_in_place(token_B1))
    begin()
    wanted = [step().clone() for _ in range(3)]  # compiles, and is what a capture must repeat
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_BV = step()
    begin()
    for number, expected in enumerate(wanted):
        graph.replay()
        if not torch.equal(logits_BV, expected):
            raise ValueError(f"the graph's logits of token {number + 1} aren't those of the call")
    return Read(begin, lambda _: graph.replay(), batch_state.nbytes)


def _batch_state(
    config: DecodeConfig, model: Decoder, tokens: int, plain: Read, *, compile: bool = False
) -> tuple[StaticBatchState, Callable[[], None]]:
    """Return a state of static shapes, and a function that writes the state after the context into all its slots."""
    batch_state = StaticBatchState(model, config.batch, tokens + ROOM, compile=compile)

    @torch.no_grad()
    def begin() -> None:
        for slot in range(config.batch):
            batch_state.insert(slot, row_of(plain.begin(), slot))

    return batch_state, begin
