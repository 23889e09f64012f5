"""The application: the routes, what requests pass before them, and the engine that runs while it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from subquad.serving import answers
from subquad.serving.config import ServeConfig
from subquad.serving.engine import Engine
from subquad.serving.errors import add_handlers
from subquad.serving.gate import Body, Count, Key
from subquad.serving.metrics import Metrics
from subquad.serving.routes import Routes, Served
from subquad.serving.texts import Texts
from subquad.version import __version__

REFUSALS = answers.errors(400, 401, 404, 408, 413, 429, 500, 503)
Responses = dict[int | str, dict[str, Any]]


def make_app(
    engine: Engine, texts: Texts, config: ServeConfig, served: Served, metrics: Metrics, *, api_key: str | None = None
) -> FastAPI:
    """The application; the engine runs while its lifespan does. `metrics` are those that the engine counts in."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    # No pages of FastAPI's: they load scripts from elsewhere.
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
    closed = answers.errors(401)
    app.add_api_route("/", routes.page, response_class=HTMLResponse)
    app.add_api_route("/health", routes.health, responses={200: {"model": answers.Health}, **answers.errors(503)})
    # What load balancers ask; routes of their own, since operations of the OpenAPI document need names of their own.
    down: Responses = {503: {"description": "The server stops, or its decoder has failed."}}
    app.add_api_route("/", routes.page, methods=["HEAD"], response_class=Response)
    app.add_api_route("/health", routes.health, methods=["HEAD"], response_class=Response, responses=down)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.add_api_route("/metrics", routes.metrics, response_class=Response, responses={**text, **closed})
    app.add_api_route("/v1/models", routes.models, responses={200: {"model": answers.ModelList}, **closed})
    one: Responses = {200: {"model": answers.Model}, **closed, **answers.errors(404)}
    app.add_api_route("/v1/models/{model:path}", routes.model, responses=one)
    events = {"content": {"text/event-stream": {}}, "description": "The answer, or with `stream` its pieces."}
    for path, route, answer in (
        ("/v1/completions", routes.completions, answers.Completion),
        ("/v1/chat/completions", routes.chat, answers.ChatCompletion),
    ):
        app.add_api_route(path, route, methods=["POST"], responses={200: {"model": answer, **events}, **REFUSALS})


def _describe_errors(app: FastAPI, *, with_key: bool) -> None:
    """Take what FastAPI assumes of invalid requests (422) out of the OpenAPI document, and tell of the key."""
    make = app.openapi

    def document() -> dict[str, Any]:
        found = make()
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if with_key and (path.startswith("/v1/") or path == "/metrics"):
                    operation["security"] = [{"key": []}]
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        if with_key:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return found

    app.openapi = document  # type: ignore[method-assign]
