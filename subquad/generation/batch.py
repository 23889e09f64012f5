"""Continuous batching: sequences join and leave a running batch, each decoded as if it were alone.

Shape letters: B slots, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from subquad.config import check_at_least
from subquad.generation.generate import Continuation, Finished, checked_prompt, read_piece
from subquad.generation.sampling import Sampler, SamplingConfig
from subquad.generation.slots import FixedSlots, LooseSlots
from subquad.inference import device_of, inference
from subquad.models import Decoder
from subquad.state import State


class Request(Continuation):
    """A sequence in a `BatchDecoder`, made by its `add`; `tokens` grows with each step.

    `error` is the exception that ended it, if one did. With `keep_state`, `state` holds at the end what was read: the
    prompt and all generated tokens but the last. `state_bytes` is the size of its state at the last token.
    """

    def __init__(
        self,
        unread: list[int],
        sampling: SamplingConfig,
        choose: Sampler,
        *,
        stop_tokens: frozenset[int],
        state: State | None,
        keep_state: bool,
        owner: BatchDecoder,
    ) -> None:
        super().__init__([], None)
        self.prompt_tokens = len(unread)
        self.error: Exception | None = None
        self.state = state
        self.state_bytes = 0
        self._unread = unread
        self._sampling = sampling
        self._choose = choose
        self._stop_tokens = stop_tokens
        self._keep_state = keep_state
        self._owner = owner
        self._slot: int | None = None


class BatchDecoder:
    """Decode many sequences together: a step reads one token of each, which costs little more than one sequence.

    A sequence joins when a slot is free and leaves when it ends. It gets the tokens that it would get with the other
    slots empty; each sequence with a seed has its own random numbers. A prompt is read before its sequence joins,
    `prefill_chunk` tokens a step, so that long prompts don't stall the others (`PerceiverAR` reads it in one piece).
    Shapes are fixed, so `compile=True` compiles the step once and CUDA graphs can replay it; `PerceiverAR` has no fixed
    shapes.

    States of constant size need no more memory for longer texts. If the state grows (`full`), a sequence may have
    `max_context` tokens in all, and each slot reserves memory for them. Not thread-safe. Raises `ValueError` for
    numbers below 1, and for `compile` with a `PerceiverAR`.
    """

    def __init__(
        self,
        model: Decoder,
        /,
        *,
        slots: int = 16,
        max_context: int = 4096,
        prefill_chunk: int = 512,
        compile: bool = False,
    ) -> None:
        check_at_least(1, slots=slots, max_context=max_context, prefill_chunk=prefill_chunk)
        self.slots = slots
        self.max_context, self._limited_by = _limit(model, max_context)
        self._model = model
        self._prefill_chunk = prefill_chunk
        if compile and not model.fixed_shapes:
            name = model.config.attention
            raise ValueError(f"compile=True needs states of fixed shape, which {name} lacks; set compile=False")
        self._slots: FixedSlots | LooseSlots = LooseSlots(model, slots)
        if model.fixed_shapes:
            with inference(model):
                self._slots = FixedSlots(model, slots, max_context, compile=compile)
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
    def state_bytes(self) -> int:
        """Return the bytes of the states of all slots."""
        return self._slots.nbytes

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig | None = None,
        /,
        *,
        stop_tokens: Collection[int] = (),
        state: State | None = None,
        keep_state: bool = False,
    ) -> Request:
        """Queue a sequence that continues `prompt`, which follows the tokens already read into `state`.

        Raises `ValueError` for an empty prompt, a token outside the vocabulary, a state of another model, and for more
        tokens than `max_context`, or the latents of a `PerceiverAR` with decode=frozen, allow.
        """
        sampling = SamplingConfig() if sampling is None else sampling
        unread = checked_prompt(prompt, self._model.config.vocab_size)
        seen = 0
        if state is not None:
            self._model.check_state(state, 1)
            seen = int(state.seen)
        if keep_state and sampling.max_tokens == 0:
            raise ValueError(
                "keep_state needs a token to generate, got max_tokens=0; Generation.read_all reads a prompt"
            )
        total = seen + len(unread) + sampling.max_tokens
        if self.max_context is not None and total > self.max_context:
            before = f"{seen} tokens before, " if seen else ""
            raise ValueError(
                f"a sequence may have {self.max_context} tokens ({self._limited_by}), but this one asks for {total}: "
                f"{before}{len(unread)} of the prompt and max_tokens={sampling.max_tokens}"
            )
        most = self._model.most_new_tokens(len(unread), state)
        if most is not None and sampling.max_tokens > most:
            raise ValueError(
                f"decode=frozen has latents for {most} tokens after a prompt of {len(unread)}, got "
                f"max_tokens={sampling.max_tokens}"
            )
        self._model.warn_on_length(total)
        request = Request(
            unread,
            sampling,
            Sampler(sampling, self._model.config.vocab_size, unread, stop_tokens=stop_tokens),
            stop_tokens=frozenset(stop_tokens),
            state=state,
            keep_state=keep_state,
            owner=self,
        )
        if sampling.max_tokens == 0:
            request.finished, request.state = "length", None
        else:
            self._waiting.append(request)
        return request

    def cancel(self, request: Request, /) -> None:
        """End a request now and free its slot (nothing if it has ended); `ValueError` for another decoder's request."""
        if request._owner is not self:
            raise ValueError("the request belongs to another decoder; cancel it there")
        if request.finished is None:
            self._end(request, "cancelled")

    def step(self) -> list[tuple[Request, int]]:
        """Read waiting prompts, `prefill_chunk` tokens of them, then one token in each slot; return the new tokens.

        They are in the order of the slots. A request with non-finite logits ends with `error`; the others continue.
        """
        with inference(self._model):
            self._read_prompts()
            if not self._running:
                return []
            fed = [0] * self.slots
            for slot, request in self._running.items():
                fed[slot] = request._unread[-1]
            logits_BV = self._slots.step(fed)
        return self._choose(logits_BV)

    def run(self) -> None:
        """Step until every request has ended."""
        while self._waiting or self._running:
            self.step()

    def _read_prompts(self) -> None:
        budget = self._prefill_chunk
        while self._waiting and self._free and budget > 0:
            request = self._waiting[0]
            before = len(request._unread)
            try:
                if before > 1:
                    request.state = read_piece(self._model, request._unread, request.state, budget)
            except (ValueError, ArithmeticError, RuntimeError) as error:  # out of memory for a long prompt, say
                self._end(request, "error", error)
                continue
            budget -= before - len(request._unread)
            if len(request._unread) == 1:
                self._waiting.popleft()
                request._slot = self._free.pop()
                self._running[request._slot] = request
                self._slots.insert(request._slot, request.state)
                request.state = None

    def _choose(self, logits_BV: Tensor) -> list[tuple[Request, int]]:
        logits_BV = logits_BV.detach()
        likeliest = logits_BV.argmax(-1).tolist()
        finite = logits_BV.isfinite().all(-1).tolist()
        events = []
        for slot, request in sorted(self._running.items()):
            if finite[slot] and request._choose.takes_the_likeliest:
                token = likeliest[slot]
            else:
                try:
                    token = request._choose(logits_BV[slot])
                except ValueError as error:
                    self._end(request, "error", error)
                    continue
            request.tokens.append(token)
            request.state_bytes = self._slots.bytes_of(slot)
            request._unread = [token]
            events.append((request, token))
            if token in request._stop_tokens:
                self._end(request, "stop")
            elif len(request.tokens) == request._sampling.max_tokens:
                self._end(request, "length")
        return events

    def _end(self, request: Request, how: Finished, error: Exception | None = None) -> None:
        request.finished, request.error = how, error
        if request._slot is None:
            self._waiting.remove(request)
            request.state = None
            return
        request.state = self._slots.take(request._slot) if request._keep_state else None
        self._slots.clear(request._slot)
        del self._running[request._slot]
        self._free.append(request._slot)
        request._slot = None


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
    requests = []
    for prompt in prompts:
        for j in range(samples):
            own = sampling if sampling.seed is None else sampling.replace(seed=sampling.seed + j)
            requests.append(decoder.add(prompt, own, stop_tokens=stop_tokens))
    decoder.run()
    return requests


def continue_together(
    model: Decoder,
    prompt: Sequence[int],
    samplings: Sequence[SamplingConfig],
    /,
    *,
    state: State | None = None,
    stop_tokens: Collection[int] = (),
    progress: Callable[[int], None] | None = None,
) -> list[Continuation]:
    """Continue one prompt in one batch, a row for each of `samplings`, which must have the same `max_tokens`.

    All rows have the same length, so no slots are needed. `state` is the state of one row before the prompt's last
    token. Ended rows are dropped from the batch once they are half of it: each drop copies the state. `progress(n)` is
    called after each step with the number of tokens that all rows have, or could have, by then.
    """
    found = [Continuation([], None) for _ in samplings]
    size, stops = model.config.vocab_size, frozenset(stop_tokens)
    choose = [Sampler(sampling, size, prompt, stop_tokens=stops) for sampling in samplings]
    rows = list(range(len(samplings)))
    state = None if state is None else State.cat([state] * len(rows))
    last, device = [prompt[-1]] * len(rows), device_of(model)
    with inference(model):
        for step in range(samplings[0].max_tokens):
            logits_BTV, state = model(torch.tensor(last, device=device)[:, None], state)
            for place, row in enumerate(rows):
                if found[row].finished is not None:
                    continue
                last[place] = choose[row](logits_BTV[place, -1])
                found[row].tokens.append(last[place])
                if last[place] in stops:
                    found[row].finished = "stop"
            if progress:
                progress((step + 1) * len(found))
            going = [place for place, row in enumerate(rows) if found[row].finished is None]
            if not going:
                break
            if 2 * len(going) <= len(rows):
                state = state.select(going)
                rows, last = [rows[place] for place in going], [last[place] for place in going]
    for continuation in found:
        continuation.finished = continuation.finished or "length"
    return found


def _limit(model: Decoder, max_context: int) -> tuple[int | None, str]:
    """Return how many tokens a sequence may have (None: any number), and the name of that limit."""
    limits: list[tuple[int, str]] = []
    if model.fixed_shapes and model.state_grows:
        limits.append((max_context, "max_context"))
    rows = model.most_tokens
    if rows is not None:
        limits.append((rows + 1, f"max_positions={rows} of the model, and a last one that is not read"))
    return min(limits) if limits else (None, "")
