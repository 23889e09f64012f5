"""Refusals, and what every request passes before the routes: the count, the key, the size of its body.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, for every status that is no success.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from subquad.serving.metrics import Metrics
from subquad.serving.schemas import explain, shortened

logger = logging.getLogger(__name__)
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
    500: "server_error",
    503: "unavailable",
}


class APIError(Exception):
    """A refusal that the client is told as it is. `code` is a short name for programs (None: by the status)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status, "error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status in (401, 429):
            kind = {401: "authentication_error", 429: "rate_limit_error"}[self.status]
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an answer."""
        return json_response(self.body(), self.status, self.headers)


def to_json(content: Any) -> str:
    """JSON in ASCII, so that text of any kind (half a surrogate pair in a client's key) can be sent."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer that no cache keeps."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(to_json(content), status, headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Answer refusals, routing errors, invalid bodies and our own mistakes in the one shape."""

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error.response()

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        path, headers = shortened(request.url.path), error.headers
        if error.status_code == 404:
            paths = {path for path in (getattr(route, "path_format", None) for route in app.routes) if path}
            message = f"there is nothing at {path}; valid: {', '.join(sorted(paths))}"
        elif error.status_code == 405:
            message = f"{path} does not take {shortened(request.method)}"
            # Of all the path's routes: Starlette names the methods of the first.
            fitting = [route for route in app.routes if isinstance(route, Route)]
            fitting = [route for route in fitting if route.path_regex.match(request.url.path)]
            headers = {"Allow": ", ".join(sorted({m for route in fitting for m in route.methods or ()}))}
        elif error.status_code == 400:  # the only one that FastAPI raises: the body could not be read as JSON
            message = "the body is not valid JSON"
        return APIError(error.status_code, message, headers=headers).response()

    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = explain(error.errors())
        return APIError(400, message, param=param).response()

    async def mistake(_request: Request, _error: Exception) -> Response:
        return APIError(500, "the server made a mistake; its log says which").response()

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, mistake)


_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
GONE = 499
"""The status that is counted where the client has gone before its answer; nobody receives it."""


class Count:
    """Counts answers by route and status, and gives up clients that take no data for `seconds`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str], seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on; other scopes are left alone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, stuck = 500, False

        async def counted(message: Message) -> None:
            nonlocal status, stuck
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                stuck = True
                raise

        try:
            await self._app(scope, receive, counted)
        except TimeoutError:
            if not stuck:
                raise
            status = GONE
            logger.warning("a client has taken no data for %g s; its connection is closed", self._seconds)
        finally:
            # Paths and methods that a client made up have no labels of their own: memory would grow with them.
            route = scope["path"] if scope["path"] in self._routes else "other"
            if scope["path"].startswith("/v1/models/"):
                route = "/v1/models/{model}"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.count_request(route, method, status)


class Key:
    """Lets requests under `/v1/` and for `/metrics` through only with `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 401."""
        if scope["type"] == "http" and (scope["path"].startswith("/v1/") or scope["path"] == "/metrics"):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time, so that answers do not tell how much of a guess is right.
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                message = "a valid API key is needed, sent as Authorization: Bearer KEY"
                error = APIError(401, message, headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Body:
    """Reads a request's body before it goes on; refuses one of more than `most` bytes or that takes too long."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or answer 413 or 408."""
        if scope["type"] != "http" or scope["method"] not in ("PATCH", "POST", "PUT"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            await APIError(408, f"the body took more than {self._seconds:g} s").response()(scope, receive, send)
            return
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        if wrong := _not_unicode(body):
            await APIError(400, wrong).response()(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        too_large = APIError(413, f"a request may have {self._most} bytes, and this one has more")
        said = Headers(scope=scope).get("content-length", "")
        if said.isdecimal() and int(said) > self._most:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)


def _not_unicode(body: bytes) -> str | None:
    """Return the fault of a body that is not Unicode text, on which pydantic and tokenizers would fail."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "the body must be UTF-8"
    if b"\0" in body[:4]:  # by these Python's json would read it as UTF-16 or UTF-32, halves of pairs included
        return "the body must be UTF-8"
    if b"\\ud" not in body.lower():
        return None
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the body must be Unicode text, and it spells half a surrogate pair (\\ud800 to \\udfff)"
    except (ValueError, RecursionError):  # no JSON: the route says so
        return None
    return None
