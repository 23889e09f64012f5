"""Bodies of answers. Only the OpenAPI document uses these classes: answers are made as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid")


class Stats(_Answer):
    """Extension: what ended an answer, its size and speed."""

    ended_by: Literal["stop_token", "stop_string", "tokens", "seconds", "shutdown"] | None
    tokens: int
    state_bytes: int
    tokens_per_s: float | None


class Usage(_Answer):
    """Tokens of all prompts, each counted once, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(_Answer):
    """Lists with an item for each token of a completion, with `echo` those of the prompt first.

    The first token of a prompt, which nothing predicts, has null for its values.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Answer):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
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


class TopLogprob(_Answer):
    """A likely token. `bytes` is null for one that stands for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of a chat's answer and the likeliest ones in its place, the likeliest first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of the answer's tokens."""

    content: list[ChatLogprob]
    refusal: None


class ChatMessage(_Answer):
    """The model's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
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


class Tokenized(_Answer):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """The answer of `POST /detokenize`."""

    prompt: str


class ModelFacts(_Answer):
    """Extension: facts of the model, and limits of the server."""

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
    """The answer of `GET /health` if all is well."""

    status: Literal["ok"]
    version: str
    model: str


class ErrorFacts(_Answer):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(_Answer):
    """Every answer that is not a success."""

    error: ErrorFacts


def error_replies(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of error answers with these statuses."""
    return {status: {"model": ErrorReply} for status in statuses}
