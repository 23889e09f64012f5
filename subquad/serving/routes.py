"""What the server answers, by path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from fastapi import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from subquad.generation.config import SamplingConfig
from subquad.serving.config import ServeConfig
from subquad.serving.engine import Engine
from subquad.serving.errors import APIError, json_response
from subquad.serving.gate import GONE
from subquad.serving.jobs import BusyError, DownError, Job
from subquad.serving.metrics import CONTENT_TYPE, Metrics
from subquad.serving.replies import Kind, Reply
from subquad.serving.schemas import ChatRequest, CompletionRequest, shortened
from subquad.serving.texts import Texts
from subquad.version import __version__

COMPLETION_TOKENS = 16
"""Tokens of a completion that asks for no number, as OpenAI has it."""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Served(NamedTuple):
    """The model that is served, by its name, and what is told of it."""

    name: str
    attention: str
    parameters: int


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is closed when they end in whatever way."""

    def __init__(self, engine: Engine, job: Job, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._engine, self._job = engine, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; the slot is free afterwards, also where the client has gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.close(self._job)


class Routes:
    """What the server answers, by path."""

    def __init__(self, engine: Engine, texts: Texts, config: ServeConfig, served: Served, metrics: Metrics) -> None:
        self._engine = engine
        self._texts = texts
        self._config = config
        self._served = served
        self._metrics = metrics
        self._created = int(time.time())
        self._page = files("subquad.serving").joinpath("page.html").read_text(encoding="utf-8")

    async def page(self) -> Response:
        """A page to try the model in a browser."""
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def health(self) -> Response:
        """`ok`, or 503 where the server stops or its decoder has failed."""
        self._check()
        return json_response({"status": "ok", "version": __version__, "model": self._served.name})

    async def metrics(self) -> Response:
        """Counts in Prometheus' text format."""
        text = self._metrics.text(self._engine.load, self._config.slots)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def models(self) -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """The model by its name."""
        self._check_model(model)
        return json_response(self._model())

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue one or more prompts."""
        self._check_model(body.model)
        self._check()
        prompts = [await self._encoded(prompt, "prompt") for prompt in body.prompts]
        return await self._answer(request, body, "completion", prompts, body.stops, body.max_tokens, COMPLETION_TOKENS)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a chat. Without a template of the model's: `role: content` lines, then `assistant:`."""
        self._check_model(body.model)
        self._check()
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        try:
            text, stops = await asyncio.to_thread(self._texts.chat, messages)
        except ValueError as error:
            raise APIError(400, str(error), param="messages") from error
        prompts = [await self._encoded(text, "messages")]
        stops = [*body.stops, *stops]
        return await self._answer(request, body, "chat", prompts, stops, body.limit, self._config.max_tokens)

    async def _encoded(self, prompt: str | list[int], param: str) -> list[int]:
        """The prompt's tokens; 400 where there are none or too many."""
        if isinstance(prompt, str):
            try:
                prompt = await asyncio.to_thread(self._texts.encode, prompt)
            except ValueError as error:
                raise APIError(400, str(error), param=param) from error
        if len(prompt) > self._config.max_prompt:
            message = f"a prompt may have {self._config.max_prompt} tokens, and this one has {len(prompt)}"
            raise APIError(400, message, param=param, code="context_length_exceeded")
        return prompt

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        kind: Kind,
        prompts: Sequence[list[int]],
        stops: Sequence[str],
        asked: int | None,
        usual: int,
    ) -> Response:
        """Decode the prompts, `n` times each, and answer as a whole or in a stream."""
        count = body.n or 1
        if count * len(prompts) > self._config.max_requests:
            message = f"{len(prompts)} prompts times n={count} are more than the {self._config.max_requests} sequences "
            raise APIError(400, message + "that the server takes at once", param="n")
        sequences = []
        for number in range(count * len(prompts)):
            prompt = prompts[number // count]
            sequences.append((prompt, self._sampling(body, number, self._tokens(len(prompt), asked, usual))))
        job = await self._submit(sequences)
        writers = [self._texts.writer(prompt, stops) for prompt, _ in sequences]
        reply = Reply(self._engine, job, kind, self._served.name, writers, sum(map(len, prompts)))
        if body.stream:
            return EventStream(self._engine, job, reply.stream(body.options))
        try:
            return json_response(await _unless_gone(request, reply.whole()))
        finally:
            self._engine.close(job)

    async def _submit(self, sequences: Sequence[tuple[list[int], SamplingConfig]]) -> Job:
        try:
            return await self._engine.submit(sequences, stop_tokens=self._texts.stop_tokens)
        except BusyError as error:
            raise APIError(429, str(error), headers={"Retry-After": "1"}) from error
        except DownError as error:
            raise APIError(503, str(error)) from error
        except ValueError as error:
            raise APIError(400, str(error)) from error

    def _tokens(self, prompt: int, asked: int | None, usual: int) -> int:
        """The tokens to generate: those asked for, or the usual number as far as the model has place."""
        most = self._config.max_tokens
        if asked is not None:
            if asked > most:
                raise APIError(400, f"max_tokens must be at most {most}, got {asked}", param="max_tokens")
            return asked
        context = self._engine.max_context
        return min(usual, most) if context is None else max(1, min(usual, most, context - prompt))

    def _sampling(self, body: CompletionRequest | ChatRequest, number: int, tokens: int) -> SamplingConfig:
        return SamplingConfig(
            max_tokens=tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k,
            top_p=None if body.top_p == 1 else body.top_p,
            min_p=body.min_p or None,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            seed=None if body.seed is None else (body.seed + number) % (1 << 63),
        )

    def _check(self) -> None:
        try:
            self._engine.check()
        except DownError as error:
            raise APIError(503, str(error)) from error

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            message = f"there is no model {shortened(name)!r}; valid: {self._served.name}"
            raise APIError(404, message, param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        facts = {
            "attention": self._served.attention,
            "parameters": self._served.parameters,
            "max_prompt": self._config.max_prompt,
            "max_tokens": self._config.max_tokens,
            "slots": self._config.slots,
            "chat_template": self._texts.template is not None,
        }
        head = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "subquad"}
        return {**head, "subquad": facts}


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The result of `work`, which is cancelled where the client disconnects before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise APIError(GONE, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
