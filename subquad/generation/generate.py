"""Generate one sequence with a carried state. If a mechanism's state is constant, memory does not grow.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from subquad.generation.batch_state import BatchState, DynamicBatchState, StaticBatchState, as_tensor
from subquad.generation.reading import Reading
from subquad.generation.requests import Request, next_tokens
from subquad.generation.sampling import SamplingConfig
from subquad.generation.speculative import MakeDraft, SpeculativeBatchState
from subquad.generation.static_speculation import StaticSpeculativeBatchState, guessing_state
from subquad.generation.static_step import log_not_recorded
from subquad.inference import inference
from subquad.layers.attached import attached
from subquad.models import Decoder
from subquad.state import State

RECORD_FROM = 64
"""Fewest tokens for which a step is recorded: twice as many as save the time it takes, as a text may end early."""


def generate(
    model: Decoder,
    prompt: Sequence[int],
    /,
    *,
    state: State | None = None,
    max_new_tokens: int = 256,
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
    record: bool | None = None,
    draft: MakeDraft | None = None,
) -> Generation:
    """Iterate over up to `max_new_tokens` tokens that continue `prompt` (token ids, at least one).

    `temperature` divides the logits; 0 takes the likeliest token. `top_k` keeps the k likeliest tokens, `top_p` the
    fewest tokens whose probabilities sum to at least p, `min_p` those at least p times as likely as the likeliest.
    `repetition_penalty` makes tokens of the prompt and of the continuation less likely; `presence_penalty` once and
    `frequency_penalty` each time those of the continuation; `logit_bias` adds to the logits of tokens. `seed` makes a
    sample repeatable. A token of `stop_tokens` ends the sequence and is its last token, after at least `min_tokens`
    others. The prompt follows the tokens read into `state` and is read in pieces that end at multiples of
    `prefill_chunk` tokens (by a `PerceiverAR` in one piece). If the state has a constant size, `record` says whether
    the step is recorded (decision 0030); None records it if `max_new_tokens` is at least `RECORD_FROM`. The log says
    whether it is.

    Raises `ValueError` for an empty prompt, a token outside the vocabulary or a number out of range.
    """
    sampling = SamplingConfig(
        max_tokens=max_new_tokens,
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
    return Generation(model, prompt, sampling, state=state, stop_tokens=stop_tokens, record=record, draft=draft)


class Generation(Iterator[int]):
    """Iterator over the tokens that `generate` samples, each computed on demand: a batch of one.

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
        record: bool | None = None,
        draft: MakeDraft | None = None,
    ) -> None:
        self._model, self._sampling, self._record, self._draft = model, sampling, record, draft
        self._reading = Reading(model, prompt, state, piece=sampling.prefill_chunk)
        self._request = Request(model, self._reading, sampling, stop_tokens=stop_tokens)
        self._batch_state: BatchState | None = None
        self._guessing: SpeculativeBatchState | StaticSpeculativeBatchState | None = None
        self._made: deque[int] = deque()
        """Tokens that were chosen in one pass, and not returned yet."""

    @property
    def state(self) -> State | None:
        """State after all tokens that the model has read, but those that have not been returned."""
        if self._guessing is not None:
            return self._guessing.state_of(0, without=len(self._made))
        return self._reading.state if self._batch_state is None else self._batch_state.state_of(0)

    @property
    def guesses(self) -> tuple[int, int]:
        """Return how many guesses were right, and how many there were."""
        return (0, 0) if self._guessing is None else (self._guessing.drafts.accepted, self._guessing.drafts.guessed)

    def prefill(self) -> None:
        """Read all but the last token of the prompt, in pieces; the first token does this too."""
        with inference(self._model):
            while self._batch_state is None and self._reading.read():
                pass

    def read_all(self) -> State:
        """Read all unread tokens, including the last returned one, and return the state after the whole text.

        Another text can continue from that state. This iterator is exhausted afterwards.
        """
        self.prefill()
        request, state = self._request, self.state
        # Of several tokens of a pass those that were not returned are not part of the text.
        unread = request.tokens[-1 - len(self._made) :][:1] if self._made else request.unread
        if unread:
            with inference(self._model):
                state = self._model.read(as_tensor(self._model, unread), state)
        self._made.clear()
        request.unread, self._reading.state, self._batch_state, self._guessing = [], state, None, None
        request.finished = request.finished or "cancelled"
        assert state is not None
        return state

    def __next__(self) -> int:
        if not self._made:
            if self._request.finished is not None:
                raise StopIteration
            self.prefill()
            with inference(self._model):
                if self._batch_state is None:
                    self._batch_state = self._begin()
                made = next_tokens(self._batch_state, 1, {0: self._request})
            if self._request.error is not None:
                raise self._request.error
            self._made.extend(token for _, token in made)
        return self._made.popleft()

    def _begin(self) -> BatchState:
        """Return the state of a batch of one slot, which holds the state after the prompt."""
        model, state, tokens = self._model, self._reading.state, self._sampling.max_tokens
        if state is not None:
            model.check_state(state, 1)
        why: str | None
        if not model.static_shapes or model.state_grows or model.most_tokens is not None:
            why = "the state has no constant size, or the model a last position"
        elif self._record is False or (self._record is None and tokens < RECORD_FROM):
            why = "it is switched off" if self._record is False else f"{tokens} tokens are fewer than {RECORD_FROM}"
        else:
            why = attached(model)
        if why is not None:
            log_not_recorded(why)
        else:
            model.warn_on_length(tokens + (0 if state is None else int(state.seen)))
        batch_state: BatchState
        if self._draft is None:
            batch_state = StaticBatchState(model, 1, 1) if why is None else DynamicBatchState(model, 1)
        else:
            batch_state = self._guessing = guessing_state(model, 1, self._draft, record=why is None)
        batch_state.insert(0, state)
        self._reading.state = None
        return batch_state
