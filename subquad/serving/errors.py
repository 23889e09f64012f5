"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, for every status that is no success."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from subquad.serving.schemas import MUST_BE, REFUSED, shortened

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
            message = f"there is nothing at {path}; valid: {', '.join(sorted(_paths(app)))}"
        elif error.status_code == 405:
            message = f"{path} does not take {shortened(request.method)}"
            headers = {"Allow": ", ".join(_methods(app, request.url.path))}
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


def _paths(app: FastAPI) -> set[str]:
    return {path for path in (getattr(route, "path_format", None) for route in app.routes) if path}


def _methods(app: FastAPI, path: str) -> list[str]:
    """What a path takes, of all its routes: Starlette names those of the first."""
    fitting = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in fitting for method in route.methods or ()})


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One sentence about the first of pydantic's errors, and the field it is about."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    place = [part for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {context.get('error')} at character {place[0] if place else 0}", None
    if kind == REFUSED:
        return str(context["message"]), str(context["param"])
    if not place:
        return "the body must be a JSON object, sent as Content-Type: application/json", None
    param = shortened(str(place[0]))
    if param in MUST_BE:  # a union: pydantic would tell of each member
        return f"{param} must be {MUST_BE[param]}", param
    where = ".".join(shortened(str(part)) for part in place)
    if kind == "missing":
        return f"{where} is missing", param
    if kind == "extra_forbidden":
        return f"unknown field {where!r}", param
    return f"{where} {error['msg'].removeprefix('Input ')}", param
