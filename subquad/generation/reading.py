"""A prompt that is read in pieces.

Shape letters: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from subquad.generation.batch_state import as_tensor
from subquad.generation.logprobs import TokenLogprob, check_top, logprobs_of
from subquad.models import Decoder
from subquad.state import State

LOGITS = 1 << 22
"""Logits that are held at a time while a prompt's log-probabilities are taken."""


class Reading:
    """A prompt that is read in pieces, once for all the requests that continue it.

    `state` is the one after what was read; `unread` are the tokens after it. The last token stays unread: the first
    decoding step reads it. With `top`, `logprobs` has an entry for each token that the read ones predict, the prompt's
    second token first, with the `top` likeliest ones in its place. Raises `ValueError` or `TypeError` for a prompt that
    is empty or holds an invalid token, and `ValueError` for a `top` beyond the vocabulary or of a model that does not
    predict every token.
    """

    def __init__(
        self, model: Decoder, prompt: Sequence[int], state: State | None = None, *, top: int | None = None
    ) -> None:
        self._model, self._top = model, top
        self.unread = checked_prompt(prompt, model.config.vocab_size)
        self.state = state
        self.logprobs: list[TokenLogprob] = []
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

    def read(self, chunk: int) -> int:
        """Read up to `chunk` tokens, but never the last one; return how many were read.

        A model that predicts for its last tokens alone (`PerceiverAR`) reads the prompt in one piece: latents at the
        end of a piece would become history of the next one.
        """
        left = len(self.unread) - 1
        count = left if self._model.predicts_last is not None else min(chunk, left)
        if count:
            self.state = self._read(count)
            del self.unread[:count]
        return count

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
