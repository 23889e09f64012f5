"""Errors, and the middleware before the routes: request counts, the API key, limits of the body.

Every answer that is not a success has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from subquad.serving.engine import BusyError, DownError
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
    """An error that is sent to the client. `code` is a short name for programs (None: derived from the status)."""

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
        """Return the error in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status in (401, 429):
            kind = {401: "authentication_error", 429: "rate_limit_error"}[self.status]
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the error as a response."""
        return json_response(self.body(), self.status, self.headers)


def to_json(content: Any) -> str:
    """Return JSON in ASCII, which can carry any text, even half a surrogate pair from a client's key."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response that caches must not store."""
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return Response(to_json(content), status, headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Answer refusals, routing errors, invalid bodies and internal errors in OpenAI's shape."""

    async def refused(_request: Request, error: Any) -> Response:
        return error.response()

    async def routing(request: Request, error: Any) -> Response:
        message = str(error.detail)
        path, headers = shortened(request.url.path), error.headers
        if error.status_code == 404:
            paths = {path for path in (getattr(route, "path_format", None) for route in app.routes) if path}
            message = f"there is nothing at {path}; valid: {', '.join(sorted(paths))}"
        elif error.status_code == 405:
            message = f"{path} does not take {shortened(request.method)}"
            # Collect the methods of all routes at the path: Starlette only names those of the first.
            fitting = [route for route in app.routes if isinstance(route, Route)]
            fitting = [route for route in fitting if route.path_regex.match(request.url.path)]
            headers = {"Allow": ", ".join(sorted({m for route in fitting for m in route.methods or ()}))}
        elif error.status_code == 400:  # FastAPI raises it only for a body that it cannot read as JSON
            message = "the body is not valid JSON"
        return APIError(error.status_code, message, headers=headers).response()

    async def invalid(_request: Request, error: Any) -> Response:
        message, param = explain(error.errors())
        return APIError(400, message, param=param).response()

    async def mistake(_request: Request, _error: Exception) -> Response:
        return APIError(500, "internal server error; see the server's log").response()

    async def busy(_request: Request, error: Exception) -> Response:
        return APIError(429, str(error), headers={"Retry-After": "1"}).response()

    async def down(_request: Request, error: Exception) -> Response:
        return APIError(503, str(error)).response()

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(BusyError, busy)
    app.add_exception_handler(DownError, down)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, mistake)


_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
GONE = 499
"""Status that is counted if the client disconnects before its answer; it is never sent."""


BODIES = 8
"""Most bodies of the largest size that are held at once; smaller ones count by their bytes."""


class Count:
    """Count answers by route and status, and drop clients that accept no data for `seconds`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[str], seconds: float) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and count its answer; scopes other than HTTP are not counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        stuck = False

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
                status = status or 500
                raise
            status = GONE
            logger.warning("a client accepted no data for %g s; its connection is closed", self._seconds)
        except BaseException:
            status = status or 500
            raise
        finally:
            # Unknown paths and methods share one label: with labels of their own, clients could fill the memory.
            route = scope["path"] if scope["path"] in self._routes else "other"
            if scope["path"].startswith("/v1/models/"):
                route = "/v1/models/{model}"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            # Without an answer and without an error, the client left in the middle of its body.
            self._metrics.count_request(route, method, status or GONE)


KEPT = ("/metrics", "/tokenize", "/detokenize")
"""Paths outside `/v1/` that need the key."""


def needs_key(path: str) -> bool:
    """Return whether requests to `path` need the server's key."""
    return path.startswith("/v1/") or path in KEPT


class Key:
    """Require `Authorization: Bearer KEY` for requests to `/v1/` and to `KEPT`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or answer 401."""
        if scope["type"] == "http" and needs_key(scope["path"]):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # Compared in constant time, so that timing doesn't reveal how much of a guess is right.
            if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                message = "a valid API key is required, sent as Authorization: Bearer KEY"
                error = APIError(401, message, headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Body:
    """Read the whole body before passing a request on; refuse more than `most` bytes and more than `seconds`.

    The bodies of all requests together may have `BODIES` times `most` bytes, from their arrival to their answer's end.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds
        self._held = 0
        """Bytes of all bodies now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or answer 408, 413, 429 or 400."""
        if scope["type"] != "http" or scope["method"] not in ("PATCH", "POST", "PUT"):
            await self._app(scope, receive, send)
            return
        sizes: list[int] = []
        try:
            await self._pass(scope, receive, send, sizes)
        finally:
            self._held -= sum(sizes)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, sizes: list[int]) -> None:
        """Pass a request on or refuse it; `sizes` gets the bytes of each part of the body that is held."""
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive, sizes)
        except TimeoutError:
            await APIError(408, f"the body took more than {self._seconds:g} s").response()(scope, receive, send)
            return
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return  # the client has disconnected
        if wrong := _not_unicode(body):
            await APIError(400, wrong).response()(scope, receive, send)
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # while it is parsed there is one copy of it

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, sizes: list[int]) -> bytes | None:
        too_large = APIError(413, f"a request may have {self._most} bytes, but this one has more")
        said = Headers(scope=scope).get("content-length", "")
        if said.isdecimal() and int(said) > self._most:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            if self._held + len(part) > BODIES * self._most:
                text = f"the server holds {self._held} bytes of requests and takes no more; try again later"
                raise APIError(429, text, headers={"Retry-After": "1"})
            body += part
            sizes.append(len(part))
            self._held += len(part)
            if len(body) > self._most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)


def _not_unicode(body: bytes) -> str | None:
    """Return why a body is not Unicode text, or None; pydantic and tokenizers would fail on such text."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return "the body must be UTF-8"
    if b"\0" in body[:4]:  # Python's json would read it as UTF-16 or UTF-32, and accept half surrogate pairs
        return "the body must be UTF-8"
    if re.search(rb"\\u[dD]", body) is None:
        return None
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the body must be Unicode text, but it spells half a surrogate pair (\\ud800 to \\udfff)"
    except (ValueError, RecursionError):  # not JSON: the route reports it
        return None
    return None
