"""The application (routes, middleware, and the engine for its lifetime) and the server that runs it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from subquad import training
from subquad.data.special_tokens import special_ids
from subquad.data.tokenizers import vocab_size
from subquad.generation import BatchDecoder, SamplingConfig, TextStream
from subquad.generation.prefix_cache import default_bytes
from subquad.generation.speculative import MakeDraft
from subquad.serving import answers
from subquad.serving.answers import error_replies
from subquad.serving.config import ServeConfig
from subquad.serving.engine import Engine, Job
from subquad.serving.gate import GONE, APIError, Body, Count, Key, add_handlers, json_response, needs_key
from subquad.serving.logprobs import Echo, chat_logprobs, completion_logprobs, echo_of
from subquad.serving.metrics import CONTENT_TYPE, Metrics
from subquad.serving.replies import Choice, Reply
from subquad.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    shortened,
)
from subquad.serving.texts import Texts
from subquad.version import __version__

REFUSALS = error_replies(400, 401, 404, 408, 413, 429, 500, 503)
Responses = dict[int | str, dict[str, Any]]
COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, the same as OpenAI's."""
WRITERS = {"completion": completion_logprobs, "chat": chat_logprobs}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Served(NamedTuple):
    """Name and facts of the served model, as clients see them."""

    name: str
    attention: str
    parameters: int


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is closed when the stream ends for any reason."""

    def __init__(self, engine: Engine, job: Job, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._engine, self._job = engine, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events and free the job's slots, even if the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._engine.close(self._job)


class Routes:
    """Handlers, one for each path."""

    def __init__(self, engine: Engine, texts: Texts, config: ServeConfig, served: Served, metrics: Metrics) -> None:
        self._engine = engine
        self._texts = texts
        self._config = config
        self._served = served
        self._metrics = metrics
        self._created = int(time.time())
        self._tokens_known = vocab_size(texts.tokenizer)
        self._page = files("subquad.serving").joinpath("page.html").read_text(encoding="utf-8")

    async def page(self) -> Response:
        """Return a page to try the model in a browser."""
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def health(self) -> Response:
        """Return `ok`, or 503 if the server is stopping or its decoder has failed."""
        self._engine.check()
        return json_response({"status": "ok", "version": __version__, "model": self._served.name})

    async def metrics(self) -> Response:
        """Return counts in Prometheus' text format."""
        text = self._metrics.text(self._engine.load, self._config.slots)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def models(self) -> Response:
        """List the served model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        """Return the model by its name."""
        self._check_model(model)
        return json_response(self._model())

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Continue one or more prompts."""
        self._check_model(body.model)
        self._engine.check()
        prompts = [await self._encoded(prompt, "prompt") for prompt in body.prompts]
        echoes: list[Echo] | None = None
        if body.echo:
            sent: Sequence[str | list[int]] = body.prompts
            pairs = zip(sent, prompts, strict=True)
            echoes = [await asyncio.to_thread(echo_of, self._texts, *pair) for pair in pairs]
        return await self._answer(request, body, prompts, body.stops, COMPLETION_TOKENS, echoes)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a chat. Without a chat template, the prompt is `role: content` lines, then `assistant:`."""
        self._check_model(body.model)
        self._engine.check()
        text, stops = await self._chat(body.messages)
        prompts = [await self._encoded(text, "messages")]
        stops = [*body.stops, *stops]
        return await self._answer(request, body, prompts, stops, self._config.max_tokens)

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Return the tokens of a prompt or a chat, as vLLM's server does."""
        self._check_model(body.model)
        text, param = body.prompt, "prompt"
        if text is None:
            (text, _), param = await self._chat(body.messages or []), "messages"
        tokens = await self._tokens_of(text, param, begin=body.add_special_tokens)
        words = [self._texts.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
        most = self._engine.max_context or self._config.max_context
        found = {"count": len(tokens), "max_model_len": most, "tokens": tokens}
        return json_response({**found, "token_strs": words})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Return the text of tokens, special ones included, as vLLM's server does."""
        self._check_model(body.model)
        if (most := max(body.tokens, default=0)) >= self._tokens_known:
            raise APIError(400, f"tokens must be below {self._tokens_known}, got {most}", param="tokens")
        text = await asyncio.to_thread(self._texts.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def _chat(self, messages: Sequence[Message]) -> tuple[str, list[str]]:
        """Return a chat's prompt and stop strings, or 400 if the model's template refuses it."""
        try:
            return await asyncio.to_thread(self._texts.chat, [{"role": m.role, "content": m.text} for m in messages])
        except ValueError as error:
            raise APIError(400, str(error), param="messages") from error

    async def _encoded(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the prompt's tokens, or 400 if there are none or too many."""
        if isinstance(prompt, str):
            prompt = await self._tokens_of(prompt, param)
        if len(prompt) > self._config.max_prompt:
            raise self._too_long(len(prompt), param)
        return prompt

    async def _tokens_of(self, text: str, param: str, *, begin: bool = True) -> list[int]:
        """Return the tokens of a text, or 400 if there are none or if no prompt is so long."""
        if len(text) > self._config.max_prompt * self._texts.longest:  # each character would take 200 bytes and 2 us
            raise self._too_long(f"{len(text)} characters", param)
        try:
            return await asyncio.to_thread(self._texts.encode, text, begin=begin)
        except ValueError as error:
            raise APIError(400, str(error), param=param) from error

    def _too_long(self, size: object, param: str) -> APIError:
        message = f"a prompt may have {self._config.max_prompt} tokens, but this one has {size}"
        return APIError(400, message, param=param, code="context_length_exceeded")

    async def _answer(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        stops: Sequence[str],
        usual: int,
        echoes: Sequence[Echo] | None = None,
    ) -> Response:
        """Decode each prompt `n` (or `best_of`) times and answer as a whole or in a stream, after `echoes`, if any."""
        n, samples, (_, top) = body.n or 1, body.samples, body.top
        if samples * len(prompts) > self._config.max_requests:
            name = "n" if samples == n else "best_of"
            message = f"{len(prompts)} prompts times {name}={samples} exceed the {self._config.max_requests} sequences "
            raise APIError(400, message + "that the server takes at once", param=name)
        tokens = [self._tokens(len(prompt), body.limit, usual) for prompt in prompts]
        self._check_logprobs(body, samples * sum(tokens) + (0 if echoes is None else n * sum(map(len, prompts))))
        sequences = [
            (prompt, [self._sampling(body, place * samples + j, tokens[place]) for j in range(samples)])
            for place, prompt in enumerate(prompts)
        ]
        try:
            job = await self._engine.submit(
                sequences,
                stop_tokens=self._stop_tokens(body, stops),
                logprobs=0 if top is None and samples > n else top,  # the best are found by them
                prompt_logprobs=None if echoes is None else top,
            )
        except ValueError as error:
            raise APIError(400, str(error)) from error
        write = None if top is None else partial(WRITERS[body.kind], self._texts)
        choices = self._choices(prompts, samples, stops, echoes)
        reply = Reply(
            self._engine, job, body.kind, self._served.name, choices, sum(map(len, prompts)), n=n, write=write
        )
        if body.stream:
            return EventStream(self._engine, job, reply.stream(body.options))
        try:
            return json_response(await _unless_gone(request, reply.whole()))
        finally:
            self._engine.close(job)

    def _choices(
        self, prompts: Sequence[list[int]], samples: int, stops: Sequence[str], echoes: Sequence[Echo] | None
    ) -> list[list[Choice]]:
        """Return the choices of each prompt, before their first tokens."""
        return [
            [
                Choice(
                    place * samples + j,
                    TextStream(self._texts.tokenizer, prompt, stops),
                    None if echoes is None else echoes[place],
                )
                for j in range(samples)
            ]
            for place, prompt in enumerate(prompts)
        ]

    def _check_logprobs(self, body: CompletionRequest | ChatRequest, tokens: int) -> None:
        """Refuse more likely tokens than there are, and more log-probabilities than an answer of `tokens` may have."""
        (name, top), most = body.top, self._config.max_logprobs
        if top is None:
            return
        if top > self._tokens_known:
            message = f"{name} must be at most {self._tokens_known}, the number of the model's tokens, got {top}"
            raise APIError(400, message, param=name)
        if tokens * (1 + top) > most:
            message = (
                f"{name}={top} for up to {tokens} tokens are {tokens * (1 + top)} log-probabilities, and an answer may "
                f"have {most}; ask for fewer, for fewer tokens or for fewer answers at once"
            )
            raise APIError(400, message, param=name)

    def _tokens(self, prompt: int, asked: int | None, usual: int) -> int:
        """Return the tokens to generate: `asked`, or else `usual`, clamped to the model's context."""
        most = self._config.max_tokens
        if asked is not None:
            if asked > most:
                raise APIError(400, f"max_tokens must be at most {most}, got {asked}", param="max_tokens")
            return asked
        context = self._engine.max_context
        return min(usual, most) if context is None else max(1, min(usual, most, context - prompt))

    def _stop_tokens(self, body: CompletionRequest | ChatRequest, stops: Sequence[str]) -> frozenset[int]:
        """Return the tokens that end a text: the model's and the request's."""
        ends = frozenset() if body.ignore_eos else self._texts.end_tokens
        return ends | special_ids(self._texts.tokenizer, stops) | frozenset(body.stop_token_ids or ())

    def _sampling(self, body: CompletionRequest | ChatRequest, number: int, tokens: int) -> SamplingConfig:
        if (body.min_tokens or 0) > tokens:
            message = f"min_tokens must be at most the {tokens} of max_tokens, got {body.min_tokens}"
            raise APIError(400, message, param="min_tokens")
        return SamplingConfig(
            max_tokens=tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k,
            top_p=None if body.top_p == 1 else body.top_p,
            min_p=body.min_p or None,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.logit_bias,
            min_tokens=body.min_tokens or 0,
            seed=None if body.seed is None else (body.seed + number) % (1 << 63),
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            message = f"unknown model {shortened(name)!r}; valid: {self._served.name}"
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
    """Return the result of `work`; cancel it if the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise APIError(GONE, "the client has disconnected")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(
    engine: Engine, texts: Texts, config: ServeConfig, served: Served, metrics: Metrics, *, api_key: str | None = None
) -> FastAPI:
    """Return the application; `engine` runs for its lifespan and counts in `metrics`."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    # No documentation pages: FastAPI's load scripts from other hosts.
    app = FastAPI(
        title="subquad", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_routes(app, Routes(engine, texts, config, served, metrics))
    add_handlers(app)
    paths = {str(getattr(route, "path", "")) for route in app.routes}
    app.add_middleware(Body, most=config.max_body, seconds=config.client_seconds)
    if api_key is not None:
        app.add_middleware(Key, key=api_key)
    if config.origins:
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=config.origins, allow_methods=["*"], allow_headers=headers)
    app.add_middleware(Count, metrics=metrics, routes=paths, seconds=config.client_seconds)
    _describe_errors(app, with_key=api_key is not None)
    return app


def _add_routes(app: FastAPI, routes: Routes) -> None:
    closed = error_replies(401)
    app.add_api_route("/", routes.page, response_class=HTMLResponse)
    app.add_api_route("/health", routes.health, responses={200: {"model": answers.Health}, **error_replies(503)})
    # For load balancers. Separate routes, because each operation in the OpenAPI document needs its own name.
    down: Responses = {503: {"description": "The server is stopping, or its decoder has failed."}}
    app.add_api_route("/", routes.page, methods=["HEAD"], response_class=Response)
    app.add_api_route("/health", routes.health, methods=["HEAD"], response_class=Response, responses=down)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.add_api_route("/metrics", routes.metrics, response_class=Response, responses={**text, **closed})
    app.add_api_route("/v1/models", routes.models, responses={200: {"model": answers.ModelList}, **closed})
    one: Responses = {200: {"model": answers.Model}, **closed, **error_replies(404)}
    app.add_api_route("/v1/models/{model:path}", routes.model, responses=one)
    events = {"content": {"text/event-stream": {}}, "description": "The answer; with `stream`, in pieces."}
    for path, route, answer in (
        ("/v1/completions", routes.completions, answers.Completion),
        ("/v1/chat/completions", routes.chat, answers.ChatCompletion),
    ):
        app.add_api_route(path, route, methods=["POST"], responses={200: {"model": answer, **events}, **REFUSALS})
    app.add_api_route(
        "/tokenize", routes.tokenize, methods=["POST"], responses={200: {"model": answers.Tokenized}, **REFUSALS}
    )
    app.add_api_route(
        "/detokenize", routes.detokenize, methods=["POST"], responses={200: {"model": answers.Detokenized}, **REFUSALS}
    )


def _describe_errors(app: FastAPI, *, with_key: bool) -> None:
    """Remove FastAPI's 422 responses, which the server never sends, from the OpenAPI document, and add the key."""
    make = app.openapi

    def document() -> dict[str, Any]:
        found = make()
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if with_key and needs_key(path):
                    operation["security"] = [{"key": []}]
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        if with_key:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return found

    app.openapi = document  # type: ignore[method-assign]


def serve(
    loaded: training.runs.LoadedRun,
    config: ServeConfig,
    listener: socket.socket,
    *,
    api_key: str | None,
    name: str,
    draft: MakeDraft | None = None,
) -> None:
    """Answer on `listener` until a signal arrives; print the address to standard output.

    `draft` makes what guesses a sequence's next tokens.
    """
    decoder = BatchDecoder(
        loaded.decoder,
        slots=config.slots,
        max_context=config.max_context,
        prefill_chunk=config.prefill_chunk,
        prefix_bytes=default_bytes(loaded.decoder) if config.prefix_bytes is None else config.prefix_bytes,
        draft=draft,
    )
    parameters = sum(parameter.numel() for parameter in loaded.decoder.parameters())
    attention = loaded.decoder.config.attention
    served = Served(name, attention if isinstance(attention, str) else ", ".join(dict.fromkeys(attention)), parameters)
    metrics = Metrics()
    engine = Engine(decoder, config, metrics)
    settings = uvicorn.Config(
        make_app(engine, Texts.of(loaded), config, served, metrics, api_key=api_key),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        # Longer than `grace_seconds`: the engine ends answers properly, uvicorn would cut them off.
        timeout_graceful_shutdown=int(config.grace_seconds) + 5,
    )
    address, port = listener.getsockname()[:2]
    at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    facts = f"{served.attention}, {parameters:,} parameters, {decoder.state_bytes:,} bytes of state"
    sys.stdout.write(f"http://{at} serves {name} ({facts}); Ctrl+C ends it\n")
    sys.stdout.flush()
    try:
        _run(Server(settings, engine), listener)
    finally:
        engine.join()  # a second Ctrl+C exits the loop without `engine.stop`


class Server(uvicorn.Server):
    """A uvicorn server that drains the engine when it is told to stop."""

    def __init__(self, settings: uvicorn.Config, engine: Engine) -> None:
        super().__init__(settings)
        self._engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running answers end, then stop the server."""
        self._engine.drain_soon()
        super().handle_exit(sig, frame)


def _run(server: Server, listener: socket.socket) -> None:
    """Serve until a signal arrives. uvicorn raises the signal again once it has stopped; ignore that one."""

    def ended(_number: int, _frame: FrameType | None) -> None:
        return None

    before = {number: signal.signal(number, ended) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
