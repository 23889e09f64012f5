"""Turn the events of a job into OpenAI's JSON, whole or streamed."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import Any, Literal

from subquad.generation.stream import TextStream
from subquad.serving.engine import DownError, Engine, Event, Job, Limit
from subquad.serving.gate import APIError, to_json
from subquad.serving.logprobs import Echo, Entry
from subquad.serving.schemas import Kind, StreamOptions

Writer = Callable[[Sequence[Entry]], dict[str, Any]]
"""Makes the field `logprobs` of entries."""
DONE = "data: [DONE]\n\n"


class Choice:
    """One answer: its text so far, which begins with `echo`, and how it ended."""

    def __init__(self, index: int, stream: TextStream, echo: Echo | None = None) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.entries: list[Entry] = []
        """Tokens with their log-probabilities that were not written yet."""
        self._echo, self._echoed = echo, 0 if echo is None else len(echo.text)
        self._nats = 0.0
        self.finish: Literal["stop", "length"] | None = None
        self._stream = stream
        self._limit: Limit | Literal["stop_string", "stop_token"] | None = None
        self.tokens = 0
        """Tokens generated so far, including a stop token."""
        self._state_bytes = 0
        self._first = self._last = 0.0

    def take(self, event: Event) -> str:
        """Return the text that `event` adds."""
        text = ""
        if self._echo is not None:
            text = self._echo.text
            self.entries += self._echo.entries(event.prompt_logprobs)
            self._echo = None
        if event.token is not None:
            self.tokens += 1
            self._first, self._last = self._first or event.seconds, event.seconds
            self._state_bytes = event.state_bytes
            if event.logprob is not None:
                self.entries.append(Entry(event.token, self._echoed + self._stream.length, event.logprob))
                self._nats += event.logprob.logprob
            if event.end != "stop":  # a stop token has no text
                text += self._stream.push(event.token)
        if self._stream.stopped is not None:
            self.finish, self._limit = "stop", "stop_string"
        elif event.end in ("stop", "length"):
            text += self._stream.finish()
            stopped = self._stream.stopped is not None  # flushing half a character can complete a stop string
            self.finish = "stop" if stopped else event.end
            self._limit = "stop_string" if stopped else "stop_token" if event.end == "stop" else event.limit
        return text

    @property
    def score(self) -> float:
        """Return the mean log-probability of the generated tokens, -inf for none."""
        return self._nats / self.tokens if self.tokens else -math.inf

    def stats(self) -> dict[str, Any]:
        """Return the field `subquad` of a choice: what ended it, bytes of the state, speed after the first token."""
        seconds = self._last - self._first
        return {
            "ended_by": self._limit,
            "tokens": self.tokens,
            "state_bytes": self._state_bytes,
            "tokens_per_s": round((self.tokens - 1) / seconds, 2) if seconds > 0 else None,
        }


class Reply:
    """The reply to one request, with the choices of each of its prompts, of which the best `n` are returned.

    `prompt_tokens` counts all its prompts; `write` makes the field `logprobs`, if there is one. An error of the decoder
    ends it, as an `APIError` of `whole` or an `error` event of `stream`.
    """

    def __init__(
        self,
        engine: Engine,
        job: Job,
        kind: Kind,
        model: str,
        choices: Sequence[Sequence[Choice]],
        prompt_tokens: int,
        *,
        n: int,
        write: Writer | None = None,
    ) -> None:
        self._engine = engine
        self._job = job
        self._kind = kind
        self._groups = choices
        self._choices = list(chain.from_iterable(choices))
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._write = write
        name = "cmpl" if kind == "completion" else "chatcmpl"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "object": "", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """Return the whole reply once all sequences have ended."""
        async for choice, text in self._pieces():
            choice.pieces.append(text)
        # Not on the event loop: there may be many log-probabilities.
        return await asyncio.to_thread(self._content)

    def _content(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for group in self._groups:
            best = group if self._n == len(group) else sorted(group, key=lambda choice: -choice.score)[: self._n]
            for choice in best:
                text = "".join(choice.pieces)
                what = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}
                choices.append({**self._choice(choice, what, stats=True), "index": len(choices)})
        name = "text_completion" if self._kind == "completion" else "chat.completion"
        return {**self._head, "object": name, "choices": choices, "usage": self._usage()}

    async def stream(self, options: StreamOptions) -> AsyncIterator[str]:
        """Yield the reply as server-sent events."""
        name = "text_completion" if self._kind == "completion" else "chat.completion.chunk"
        head = {**self._head, "object": name}
        usage = {"usage": None} if options.include_usage else {}

        def chunk(choice: Choice, text: str | None, *, stats: bool) -> str:
            what: dict[str, Any] = {"text": text or ""}
            if self._kind == "chat":
                what = {"delta": {} if text is None else {"content": text}}
            return _event({**head, "choices": [self._choice(choice, what, stats=stats)], **usage})

        if self._kind == "chat":
            for choice in self._choices:
                what = {"delta": {"role": "assistant", "content": ""}}
                yield _event({**head, "choices": [self._choice(choice, what, stats=False)], **usage})
        try:
            async for choice, text in self._pieces():
                finish, choice.finish = choice.finish, None  # the end is sent in its own chunk
                if text:
                    yield chunk(choice, text, stats=options.include_stats)
                choice.finish = finish
                if finish is not None:
                    yield chunk(choice, None, stats=True)
        except APIError as error:
            yield _event(error.body()) + DONE
            return
        if options.include_usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    async def _pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """Yield the texts of all choices as they arrive, until each has ended."""
        left = set(range(len(self._choices)))
        while left:
            if not self._job.events.empty():
                await asyncio.sleep(0)  # a lost client is noticed between the pieces that wait, not after them
            event = await self._job.events.get()
            if event.index not in left:
                continue  # decoded before the engine cancelled the sequence at a stop string
            if event.end == "error":
                raise failure(event.error)
            choice = self._choices[event.index]
            text = choice.take(event)
            if choice.finish is not None:
                left.discard(event.index)
                self._engine.cancel(self._job, event.index, "stop")
            yield choice, text

    def _choice(self, choice: Choice, what: dict[str, Any], *, stats: bool) -> dict[str, Any]:
        extra = {"subquad": choice.stats()} if stats else {}
        entries, choice.entries = choice.entries, []
        logprobs = self._write(entries) if self._write is not None and entries else None
        return {"index": choice.index, **what, "logprobs": logprobs, "finish_reason": choice.finish, **extra}

    def _usage(self) -> dict[str, int]:
        generated = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
        }


def failure(error: Exception | None) -> APIError:
    """Return the error for a client whose sequence failed during decoding."""
    if isinstance(error, DownError):
        return APIError(503, str(error))
    return APIError(500, f"this sequence could not be decoded: {error}")


def _event(content: Any) -> str:
    return f"data: {to_json(content)}\n\n"
