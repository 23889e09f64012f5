"""Continuous batching: sequences join and leave a running batch, each decoded as if it were alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from subquad.config import check_at_least
from subquad.generation.batch_state import BatchState, DynamicBatchState, StaticBatchState
from subquad.generation.prefix_cache import PrefixCache, PrefixCounts
from subquad.generation.reading import Reading
from subquad.generation.requests import Finished, Request, next_tokens
from subquad.generation.sampling import SamplingConfig
from subquad.generation.speculative import MakeDraft, SpeculativeBatchState
from subquad.generation.static_speculation import StaticSpeculativeBatchState, guessing_state
from subquad.inference import inference
from subquad.models import Decoder
from subquad.state import State


class BatchDecoder:
    """Decode many sequences together: a step reads one token of each, which costs little more than one sequence.

    A sequence joins when a slot is free and leaves when it ends. It gets the tokens that it would get with the other
    slots empty; each sequence with a seed has its own random numbers. A prompt is read before its sequences join, in
    pieces that end at multiples of `prefill_chunk` tokens. A step reads pieces until they have so many tokens, always
    fewer than twice as many, so that long prompts don't stall the others (`PerceiverAR` reads a prompt in one piece).
    Shapes are static, so the step is recorded once (decision 0030; not with `record=False`), `compile=True` compiles it
    once and CUDA graphs can replay it. `PerceiverAR` has no static shapes: its steps call the model. `draft` makes what
    guesses a sequence's next tokens: a step reads guesses too, and may give several tokens of a sequence.

    With `prefix_bytes` the states after whole pieces of prompts are kept in so many bytes of the host's memory; the
    least recently used ones go first. A prompt that begins as an earlier one reads only what follows the last piece
    whose state is kept, and its state is bitwise the one without reuse. Generated tokens are not read in pieces, so a
    chat's next turn reads its last answer again. Make a new decoder when the model's weights change.

    States of constant size need no more memory for longer texts. If the state grows (`full`), a sequence may have
    `max_context` tokens in all, and each slot reserves memory for them. Not thread-safe. Raises `ValueError` for
    numbers below 1, for `compile` with a `PerceiverAR` or a draft, and for `prefix_bytes` with a `PerceiverAR` or
    beyond the host's memory.
    """

    def __init__(
        self,
        model: Decoder,
        /,
        *,
        slots: int = 16,
        max_context: int = 4096,
        prefill_chunk: int = 256,
        prefix_bytes: int = 0,
        compile: bool = False,
        record: bool = True,
        draft: MakeDraft | None = None,
    ) -> None:
        check_at_least(1, slots=slots, max_context=max_context, prefill_chunk=prefill_chunk)
        check_at_least(0, prefix_bytes=prefix_bytes)
        self.slots = slots
        self.max_context, self._limited_by = _limit(model, max_context)
        self._model = model
        self._prefill_chunk = prefill_chunk
        if compile and not model.static_shapes:
            name = model.config.attention
            raise ValueError(f"compile=True needs states of static shape, which {name} lacks; set compile=False")
        if compile and draft is not None:
            raise ValueError(
                "compile=True needs steps of one token, and with a draft they read guesses: set compile=False"
            )
        if prefix_bytes and model.predicts_last is not None:
            raise ValueError(
                f"prefix_bytes={prefix_bytes} needs prompts that are read in pieces, but {model.config.attention} "
                "reads them in one: set prefix_bytes=0"
            )
        self._prefixes = PrefixCache(prefix_bytes) if prefix_bytes else None
        self._batch_state: BatchState
        self._guessing: SpeculativeBatchState | StaticSpeculativeBatchState | None = None
        with inference(model):
            if draft is not None:
                self._batch_state = self._guessing = guessing_state(model, slots, draft, record=record)
            elif model.static_shapes:
                self._batch_state = StaticBatchState(model, slots, max_context, compile=compile, record=record)
            else:
                self._batch_state = DynamicBatchState(model, slots)
        self._free = list(range(slots - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}

    @property
    def waiting(self) -> int:
        """Return the number of requests that have not joined yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of requests in a slot."""
        return len(self._running)

    @property
    def free(self) -> int:
        """Return the number of empty slots."""
        return len(self._free)

    @property
    def guesses(self) -> tuple[int, int]:
        """Return how many guesses were right, and how many there were."""
        return (0, 0) if self._guessing is None else (self._guessing.drafts.accepted, self._guessing.drafts.guessed)

    @property
    def prefixes(self) -> PrefixCounts:
        """Return how often prompts began as earlier ones, and what is kept of those."""
        return PrefixCounts() if self._prefixes is None else self._prefixes.counts

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states of all slots."""
        return self._batch_state.nbytes

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig | None = None,
        /,
        *,
        stop_tokens: Collection[int] = (),
        state: State | None = None,
        keep_state: bool = False,
        before: Sequence[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Request:
        """Queue a sequence that continues `prompt`; `add_samples` says how, and what it raises."""
        (request,) = self.add_samples(
            prompt,
            [SamplingConfig() if sampling is None else sampling],
            stop_tokens=stop_tokens,
            state=state,
            keep_state=keep_state,
            before=before,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return request

    def add_samples(
        self,
        prompt: Sequence[int],
        samplings: Sequence[SamplingConfig],
        /,
        *,
        stop_tokens: Collection[int] = (),
        state: State | None = None,
        keep_state: bool = False,
        before: Sequence[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[Request]:
        """Queue a sequence for each of `samplings` that continues `prompt`, which is read once for all of them.

        The prompt follows the tokens already read into `state`. A repetition penalty counts the tokens of the prompt
        and those of `before`, which the state has read. With `logprobs=k` a request records each token's
        log-probability and the k likeliest ones of its place, with `prompt_logprobs=k` those of the prompt, also for
        `max_tokens=0`. They are of the model's own distribution, before temperature, penalties, biases and filters.

        Raises `ValueError` for an empty prompt, a token outside the vocabulary, a state of another model, and for more
        tokens than `max_context`, the latents of a `PerceiverAR` with decode=frozen, or the vocabulary allow, and for
        `prompt_logprobs` of a `PerceiverAR`.
        """
        seen = 0
        if state is not None:
            self._model.check_state(state, 1)
            seen = int(state.seen)
        reading = Reading(
            self._model,
            prompt,
            state,
            piece=self._prefill_chunk,
            top=prompt_logprobs,
            prefixes=self._prefixes,
        )
        requests = []
        for sampling in samplings:
            self._check_room(seen, len(reading.unread), sampling.max_tokens, state)
            if keep_state and sampling.max_tokens == 0:
                raise ValueError(
                    "keep_state needs a token to generate, got max_tokens=0; Generation.read_all reads a prompt"
                )
            request = Request(
                self._model,
                reading,
                sampling,
                stop_tokens=stop_tokens,
                keep_state=keep_state,
                owner=self,
                before=before,
                top=logprobs,
            )
            if prompt_logprobs is not None:
                request.finished = None  # until the prompt is read, even if no token follows
            if request.finished is not None:
                request.reading = None
            requests.append(request)
        self._waiting.extend(request for request in requests if request.reading is not None)
        return requests

    def _check_room(self, seen: int, prompt: int, tokens: int, state: State | None) -> None:
        """Raise `ValueError` if `tokens` don't fit after `seen` tokens of a state and `prompt` ones."""
        total = seen + prompt + tokens
        if self.max_context is not None and total > self.max_context:
            read = f"{seen} tokens before, " if seen else ""
            raise ValueError(
                f"a sequence may have {self.max_context} tokens ({self._limited_by}), but this one asks for {total}: "
                f"{read}{prompt} of the prompt and max_tokens={tokens}"
            )
        most = self._model.most_new_tokens(prompt, state)
        if most is not None and tokens > most:
            raise ValueError(
                f"decode=frozen has latents for {most} tokens after a prompt of {prompt}, got max_tokens={tokens}"
            )
        self._model.warn_on_length(total)

    def cancel(self, request: Request, /) -> None:
        """End a request now and free its slot (nothing if it has ended); `ValueError` for another decoder's request."""
        if request.owner is not self:
            raise ValueError("the request belongs to another decoder; cancel it there")
        if request.finished is None:
            self._end(request, "cancelled")

    def step(self) -> list[tuple[Request, int]]:
        """Read pieces of waiting prompts, then one token in each slot; return the new tokens.

        They are in the order of the slots, and one sequence's in the order of its text. A request with non-finite
        logits ends with `error`; the others continue.
        """
        with inference(self._model):
            self._read_prompts()
            made = next_tokens(self._batch_state, self.slots, self._running) if self._running else []
            for request in [request for request in self._running.values() if request.finished is not None]:
                self._leave(request)
        return made

    def run(self) -> None:
        """Step until every request has ended."""
        while self._waiting or self._running:
            self.step()

    def _read_prompts(self) -> None:
        budget = self._prefill_chunk
        while self._waiting and self._free and budget > 0:
            request = self._waiting[0]
            reading = request.reading
            assert reading is not None
            try:
                budget -= reading.read()
            except (ValueError, ArithmeticError, RuntimeError) as error:  # out of memory for a long prompt, say
                for other in [other for other in self._waiting if other.reading is reading]:
                    self._end(other, "error", error)
                continue
            if not reading.done:
                continue
            if request.max_tokens == 0:
                self._end(request, "length")
                continue
            self._waiting.popleft()
            request.slot = self._free.pop()
            self._running[request.slot] = request
            self._batch_state.insert(request.slot, reading.state)
            request.reading = None

    def _end(self, request: Request, how: Finished, error: Exception | None = None) -> None:
        request.finished, request.error = how, error
        if request.slot is not None:
            self._leave(request)
            return
        self._waiting.remove(request)
        request.reading = None

    def _leave(self, request: Request) -> None:
        """Free the slot of a request that has ended."""
        assert request.slot is not None
        if request.keep_state:
            request.state = self._batch_state.state_of(request.slot)
        self._batch_state.clear(request.slot)
        del self._running[request.slot]
        self._free.append(request.slot)
        request.slot = None


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    /,
    sampling: SamplingConfig | None = None,
    *,
    samples: int = 1,
    slots: int = 16,
    max_context: int = 4096,
    stop_tokens: Collection[int] = (),
) -> list[Request]:
    """Continue each of `prompts`, of any lengths, `samples` times and return the requests, in the prompts' order.

    Sample j of a prompt, from 0, has the seed `seed + j`. Raises as `BatchDecoder`, and `ValueError` for `samples`
    below 1.
    """
    check_at_least(1, samples=samples)
    sampling = SamplingConfig() if sampling is None else sampling
    decoder = BatchDecoder(model, slots=slots, max_context=max_context, prefill_chunk=sampling.prefill_chunk)
    seed = sampling.seed
    samplings = [sampling if seed is None else sampling.replace(seed=seed + j) for j in range(samples)]
    requests = []
    for prompt in prompts:
        requests += decoder.add_samples(prompt, samplings, stop_tokens=stop_tokens)
    decoder.run()
    return requests


def _limit(model: Decoder, max_context: int) -> tuple[int | None, str]:
    """Return how many tokens a sequence may have (None: any number), and the name of that limit."""
    limits: list[tuple[int, str]] = []
    if model.static_shapes and model.state_grows:
        limits.append((max_context, "max_context"))
    rows = model.most_tokens
    if rows is not None:
        limits.append((rows + 1, f"max_positions={rows} of the model, and a last one that is not read"))
    return min(limits) if limits else (None, "")
