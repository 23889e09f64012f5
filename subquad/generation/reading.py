"""A prompt that is read in pieces, which begin and end at the same places whatever else is read.

Shape letters: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.generation.batch_state import as_tensor
from subquad.generation.logprobs import TokenLogprob, check_top, logprobs_of
from subquad.generation.prefix_cache import PrefixCache, prefix_keys
from subquad.inference import device_of
from subquad.models import Decoder
from subquad.state import State

LOGITS = 1 << 22
"""Logits that are held at a time while a prompt's log-probabilities are taken."""


class Reading:
    """A prompt that is read in pieces, once for all the requests that continue it.

    A piece ends at the next multiple of `piece` tokens, counted from the beginning of the sequence with those of
    `state`, or before the prompt's last token, which stays unread: the first decoding step reads it. A model that
    predicts for its last tokens alone (`PerceiverAR`) reads the prompt in one piece: latents at the end of a piece
    would become history of the next one.

    `state` is the one after what was read; `unread` are the tokens after it. With `top`, `logprobs` has an entry for
    each token that the read ones predict, the prompt's second token first, with the `top` likeliest ones in its place.

    With `prefixes` the states after whole pieces are kept there, and reading begins after the last piece whose state is
    known. Since the pieces are the same, so are the bits of the state after the prompt. A prompt after a `state` uses
    no `prefixes`, as the tokens before it are unknown; with `top` all tokens are read.

    Raises `ValueError` or `TypeError` for a prompt that is empty or holds an invalid token, and `ValueError` for a
    `top` beyond the vocabulary or of a model that does not predict every token.
    """

    def __init__(
        self,
        model: Decoder,
        prompt: Sequence[int],
        state: State | None = None,
        *,
        piece: int,
        top: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._model, self._piece, self._top = model, piece, top
        self.unread = checked_prompt(prompt, model.config.vocab_size)
        self.state = state
        self.logprobs: list[TokenLogprob] = []
        self._prefixes = prefixes if state is None else None
        self._keys = [] if self._prefixes is None else prefix_keys(self.unread[:-1], piece)
        self._seen = 0 if state is None else int(state.seen)
        check_top(top, model.config.vocab_size, "prompt_logprobs")
        if top is not None and model.predicts_last is not None:
            raise ValueError(
                f"log-probabilities of a prompt need predictions of all its tokens, but {model.config.attention} "
                f"predicts only the last {model.predicts_last}; ask for those of the generated tokens alone"
            )

    @property
    def done(self) -> bool:
        """Return whether only the last token is left."""
        return len(self.unread) == 1

    def read(self) -> int:
        """Read the next piece and return how many tokens it has, 0 if only the last token is left."""
        if self._prefixes is not None and self._seen == 0 and self._top is None:
            self._begin(self._prefixes.find(self._keys))
        left = len(self.unread) - 1
        count = left if self._model.predicts_last is not None else min(self._piece - self._seen % self._piece, left)
        if not count:
            return 0
        self.state = self._read(count)
        del self.unread[:count]
        self._seen += count
        if self._seen % self._piece == 0:
            self.state = self.state.map(_alone)
            if self._prefixes is not None:
                self._prefixes.keep(self._keys[: self._seen // self._piece], self.state)
        return count

    def _begin(self, state: State | None) -> None:
        """Begin after the tokens of `state`."""
        if state is not None:
            self.state = state.to(device_of(self._model))
            self._seen = int(state.seen)
            del self.unread[: self._seen]

    def _read(self, count: int) -> State:
        """Return the state after `count` more tokens; add the log-probabilities of those that they predict."""
        tokens_BT = as_tensor(self._model, self.unread[:count])
        if self._top is None:
            return self._model.read(tokens_BT, self.state)
        h_BTD, state = self._model.hidden(tokens_BT, self.state)
        made: list[TokenLogprob] = []
        piece = max(1, LOGITS // self._model.config.vocab_size)
        for start in range(0, count, piece):
            end = min(start + piece, count)
            logits_TV = self._model.logits(h_BTD[0, start:end])
            made += logprobs_of(logits_TV, self.unread[start + 1 : end + 1], self._top)
        self.logprobs += made
        return state


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and in memory of its own, so that a state that is kept keeps no larger tensor alive.

    Reading goes on from this tensor also where nothing is kept, since other strides may round otherwise.
    """
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


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
