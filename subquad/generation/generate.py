"""Generate one sequence with a carried state: with constant-state mechanisms, memory does not grow.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from subquad.generation.sampling import Sampler, SamplingConfig
from subquad.generation.slots import FixedSlots, as_tensor
from subquad.inference import inference
from subquad.models import Decoder
from subquad.state import State

Finished = Literal["length", "stop", "cancelled", "error"]
RECORD_AFTER = 512
"""Tokens after which a step is recorded (`FixedSlots`), which takes as long as it saves in about as many tokens."""


@dataclass(eq=False)
class Continuation:
    """Tokens that continue a prompt, with a stop token last, if one ended it.

    `finished` is None while it grows, then `length` (`max_tokens` were generated), `stop`, `cancelled` or `error`.
    """

    tokens: list[int]
    finished: Finished | None


def generate(
    model: Decoder,
    prompt: Sequence[int],
    /,
    *,
    state: State | None = None,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    min_tokens: int = 0,
    seed: int | None = None,
    stop_tokens: Collection[int] = (),
    prefill_chunk: int = 4096,
) -> Generation:
    """Iterate over up to `max_tokens` tokens that continue `prompt` (token ids, at least one).

    `temperature` divides the logits; 0 takes the likeliest token. `top_k` keeps the k likeliest tokens, `top_p` the
    fewest tokens whose probabilities sum to at least p, `min_p` those at least p times as likely as the likeliest.
    `repetition_penalty` makes tokens of the prompt and of the continuation less likely; `presence_penalty` once and
    `frequency_penalty` each time those of the continuation; `logit_bias` adds to the logits of tokens. `seed` makes a
    sample repeatable. A token of `stop_tokens` ends the sequence and is its last token, after at least `min_tokens`
    others. The prompt follows the tokens read into `state` and is read `prefill_chunk` tokens at a time (by a
    `PerceiverAR` in one piece).

    Raises `ValueError` for an empty prompt, a token outside the vocabulary or a number out of range.
    """
    sampling = SamplingConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        min_tokens=min_tokens,
        seed=seed,
        prefill_chunk=prefill_chunk,
    )
    return Generation(model, prompt, sampling, state=state, stop_tokens=stop_tokens)


class Generation(Iterator[int]):
    """Iterator over the tokens that `generate` samples, each computed on demand.

    `state` covers what the model has read: the prompt (after `prefill`, all but its last token) and all returned tokens
    but the last. To continue later, keep `state` and begin the next prompt with that last token.
    """

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        /,
        *,
        state: State | None = None,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self._state = state
        self._slots: FixedSlots | None = None
        self._model = model
        self._sampling = sampling
        self._stop_tokens = frozenset(stop_tokens)
        self._unread = checked_prompt(prompt, model.config.vocab_size)
        self._left = sampling.max_tokens
        self._choose = Sampler(sampling, model.config.vocab_size, self._unread, stop_tokens=self._stop_tokens)

    @property
    def state(self) -> State | None:
        """State after all tokens that the model has read."""
        return self._state if self._slots is None else self._slots.take(0)

    def prefill(self) -> None:
        """Read all but the last token of the prompt, in chunks; the first token does this too."""
        with inference(self._model):
            while len(self._unread) > 1:
                self._state = read_piece(self._model, self._unread, self._state, self._sampling.prefill_chunk)

    def read_all(self) -> State:
        """Read the rest, including the last returned token, and return the state after the whole text.

        Another text can continue from that state; this iterator is then exhausted.
        """
        self.prefill()
        state, self._slots = self.state, None
        with inference(self._model):
            if self._unread:
                state = self._model.read(as_tensor(self._model, self._unread), state)
        self._unread, self._left, self._state = [], 0, state
        assert state is not None
        return state

    def __next__(self) -> int:
        if self._left == 0:
            raise StopIteration
        self.prefill()
        with inference(self._model):
            token = self._choose(self._read_last())
        self._unread = [token]
        self._left = 0 if token in self._stop_tokens else self._left - 1
        return token

    def _read_last(self) -> Tensor:
        """Read the last token and return the logits `[V]` of the next."""
        model, state = self._model, self._state
        fixed = model.fixed_shapes and not model.state_grows and model.most_tokens is None
        long = min(self._left, self._sampling.max_tokens - self._left) >= RECORD_AFTER
        if self._slots is None and state is not None and fixed and long:
            self._slots, self._state = FixedSlots(model, 1, 1), None
            self._slots.insert(0, state)
            model.warn_on_length(int(state.seen) + self._left)
        if self._slots is not None:
            return self._slots.step(self._unread)[0]
        logits_BTV, self._state = model(as_tensor(model, self._unread), state)
        return logits_BTV[0, -1]


def checked_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Return the prompt as a list. Raises `ValueError` or `TypeError` if it is empty or holds an invalid token."""
    if not len(prompt):
        raise ValueError("the prompt must hold at least one token, got none")
    tokens = []
    for token in prompt:
        try:
            tokens.append(operator.index(token))
        except TypeError as error:
            raise TypeError(f"the prompt's tokens must be whole numbers, got {token!r}") from error
        if not 0 <= tokens[-1] < vocab_size:
            raise ValueError(f"the prompt's tokens must be between 0 and {vocab_size - 1}, got {token}")
    return tokens


def read_piece(model: Decoder, unread: list[int], state: State | None, chunk: int) -> State:
    """Read up to `chunk` tokens of `unread`, sparing its last one, remove them, and return the state after them.

    A model with predictions for its last tokens alone (`PerceiverAR`) reads them in one piece: each piece would end
    with latents that the next piece would turn into history.
    """
    left = len(unread) - 1
    tokens = unread[: min(chunk, left) if model.predicts_last is None else left]
    state = model.read(as_tensor(model, tokens), state)
    del unread[: len(tokens)]
    return state
