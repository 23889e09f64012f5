"""What answers look like: for the OpenAPI document alone, since answers are made as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stats(_Answer):
    """Extension: what ended an answer, and what it cost."""

    ended_by: Literal["stop_token", "stop_string", "tokens", "seconds", "shutdown"] | None
    tokens: int
    state_bytes: int
    tokens_per_s: float | None


class Usage(_Answer):
    """Tokens of the prompts, each counted once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(_Answer):
    """One answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]
    subquad: Stats


class Completion(_Answer):
    """The answer of `POST /v1/completions` without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(_Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: Literal["stop", "length"]
    subquad: Stats


class ChatCompletion(_Answer):
    """The answer of `POST /v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelFacts(_Answer):
    """Extension: what the model is, and what the server allows."""

    attention: str
    parameters: int
    max_prompt: int
    max_tokens: int
    slots: int
    chat_template: bool


class Model(_Answer):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    subquad: ModelFacts


class ModelList(_Answer):
    """The answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Health(_Answer):
    """The answer of `GET /health` where all is well."""

    status: Literal["ok"]
    version: str
    model: str


class ErrorFacts(_Answer):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(_Answer):
    """Every answer that is no success."""

    error: ErrorFacts


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of a route's OpenAPI document for these statuses."""
    return {status: {"model": ErrorReply} for status in statuses}
