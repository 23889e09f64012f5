"""One sequence that is generated, and the step that chooses the next token of each.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from subquad.generation.batch_state import BatchState
from subquad.generation.logprobs import TokenLogprob, check_top, logprobs_of
from subquad.generation.reading import Reading
from subquad.generation.sampling import Sampler, SamplingConfig
from subquad.models import Decoder
from subquad.state import State

Finished = Literal["length", "stop", "cancelled", "error"]


@dataclass(eq=False)
class Continuation:
    """Tokens that continue a prompt, with a stop token last, if one ended it.

    `finished` is None while tokens are added, then `length` (`max_tokens` were generated), `stop`, `cancelled` or
    `error`.
    """

    tokens: list[int]
    finished: Finished | None


class Request(Continuation):
    """A sequence of a `Generation` or, made by `add`, of a `BatchDecoder`; each step adds to `tokens`.

    It continues the prompt of `reading`, which other requests may share. `error` is the exception that ended it, if one
    did. With `keep_state`, `state` is at the end the state after the prompt and all generated tokens but the last.
    `state_bytes` is the size of its state at the last token. With `top`, `logprobs` has an entry for each of `tokens`,
    with the `top` likeliest ones in its place; `prompt_logprobs` are those of the prompt, as `Reading` says. Raises
    `ValueError` for a `top` beyond the vocabulary.
    """

    def __init__(
        self,
        model: Decoder,
        reading: Reading,
        sampling: SamplingConfig,
        *,
        stop_tokens: Collection[int] = (),
        keep_state: bool = False,
        owner: object = None,
        before: Sequence[int] = (),
        top: int | None = None,
    ) -> None:
        super().__init__([], None if sampling.max_tokens else "length")
        check_top(top, model.config.vocab_size, "logprobs")
        self.error: Exception | None = None
        self.state: State | None = None
        self.state_bytes = 0
        self.reading: Reading | None = reading
        self.unread = reading.unread[-1:]
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs = reading.logprobs
        self._top = top
        self._sampling = sampling
        self.text = [*before, *reading.unread]
        """The tokens before, as far as they are known, the prompt's, and those that were generated."""
        self._choose = Sampler(sampling, model.config.vocab_size, self.text, stop_tokens=stop_tokens)
        self._stop_tokens = frozenset(stop_tokens)
        self.keep_state = keep_state
        self.owner = owner
        self.slot: int | None = None

    @property
    def max_tokens(self) -> int:
        """Return the most tokens to generate."""
        return self._sampling.max_tokens

    def choose(self, guesses: list[int], logits_KV: Tensor, likeliest: list[int], finite: list[bool]) -> list[int]:
        """Add the token after the last one, and one after each guess that was right; return them.

        Logits that are not all `finite` end the request.
        """
        chosen: list[int] = []
        for k in range(len(guesses) + 1):
            if finite[k] and self._choose.takes_the_likeliest:
                token = likeliest[k]
            else:
                try:
                    token = self._choose(logits_KV[k])
                except ValueError as error:
                    self.finished, self.error = "error", error
                    break
            if self._top is not None:
                self.logprobs += logprobs_of(logits_KV[k, None], [token], self._top)
            self._add(token)
            chosen.append(token)
            if self.finished is not None or guesses[k : k + 1] != [token]:
                break
        return chosen

    @property
    def most_left(self) -> int:
        """Return how many more tokens may be generated."""
        return self._sampling.max_tokens - len(self.tokens)

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        self.text.append(token)
        self.unread = [token]
        if token in self._stop_tokens:
            self.finished = "stop"
        elif len(self.tokens) == self._sampling.max_tokens:
            self.finished = "length"


def next_tokens(batch_state: BatchState, slots: int, running: Mapping[int, Request]) -> list[tuple[Request, int]]:
    """Read the last token of each running request and return each request with its next token, in order of slots.

    With guesses, which are read in the same pass, a request may get several tokens. `running` has the requests by their
    slot, below `slots`. All tokens are chosen here, except those of beams. A request with non-finite logits is finished
    by an `error`.
    """
    fed = [[0]] * slots
    for slot, request in running.items():
        fed[slot] = [request.unread[-1], *batch_state.guesses(slot, request.text, request.most_left - 1)]
    logits_BKV = batch_state.read(fed).detach()
    likeliest, finite = logits_BKV.argmax(-1).tolist(), logits_BKV.isfinite().all(-1).tolist()
    made, wrong = list[tuple[Request, int]](), dict[int, int]()
    for slot, request in sorted(running.items()):
        chosen = request.choose(fed[slot][1:], logits_BKV[slot], likeliest[slot], finite[slot])
        made += [(request, token) for token in chosen]
        wrong[slot] = len(fed[slot]) - max(1, len(chosen))  # the last one chosen is read in the next step
    batch_state.take_back(wrong)
    for slot, request in running.items():
        request.state_bytes = batch_state.bytes_of(slot)
    return made
