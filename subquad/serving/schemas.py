"""Bodies of requests, and messages for invalid ones.

OpenAI's fields that are not supported are accepted with values that ask for nothing, and refused otherwise.

Lists are checked up to their first wrong item (`fail_fast`): an error for each item of a body of megabytes would take
seconds and gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from subquad.config import suggest

Kind = Literal["completion", "chat"]
"""What a request asks for."""
REFUSED = "refused_field"
"""Error type for unknown and unsupported fields."""
ECHOED = 100
"""Most characters of a client's input that an error repeats."""
MUST_BE = {
    "prompt": "a text, a list of token ids, or a list of at most 128 texts or lists of token ids; none may be empty",
    "stop": "a text of 1 to 1000 characters or a list of at most 4 of them",
}
"""Rules for fields that take more than one type."""
CONTENT = (
    'a text or a list of at most 128 parts like {"type": "text", "text": "hi"}; no pictures, sound or files are read'
)


Filled = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Token = Annotated[int, Field(ge=0, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]


def shortened(word: str) -> str:
    """Return `word` cut to `ECHOED` characters, for use in an error."""
    return word if len(word) <= ECHOED else f"{word[:ECHOED]}..."


def _refuse(param: str, message: str) -> None:
    raise PydanticCustomError(REFUSED, "{message}", {"param": param, "message": message})


def _checked_biases(values: Any) -> Any:
    """Return `logit_bias` with whole numbers for keys; refuse the first wrong item: pydantic would collect them all."""
    rule = 'logit_bias must map token ids, such as "50256", to numbers between -100 and 100'
    if not isinstance(values, dict):
        _refuse("logit_bias", rule)
    for key, bias in values.items():
        if not (re.fullmatch("[0-9]{1,9}", str(key)) and type(bias) in (int, float) and -100 <= bias <= 100):
            _refuse("logit_bias", f"{rule}, got {shortened(repr(key))}: {shortened(repr(bias))}")
    return {int(key): float(bias) for key, bias in values.items()}


Biases = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_checked_biases)]


class _Strict(BaseModel):
    """A part of a request; only the first unknown field is an error: pydantic would collect one for each."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        unknown = next((key for key in values if key not in cls.model_fields), None)
        return {key: value for key, value in values.items() if key in cls.model_fields or key == unknown}


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: Flag = Field(default=False, description="End with a chunk that counts the tokens.")
    include_stats: Flag = Field(default=False, description="Extension: state size and tokens/s in each chunk's choice.")
    include_obfuscation: Flag = Field(default=False, description="Accepted and ignored: nothing is obfuscated.")


class _Request(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="forbid")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "metadata": (None, {}),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
    }
    """OpenAI's fields that are not supported, with the values of each that ask for nothing."""
    kind: ClassVar[Kind]

    model: str | None = Field(None, description="The served model; optional.")
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(None, description="0 takes the likeliest token.")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=1)] | None = Field(None, description="Extension: keep the k likeliest tokens.")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(
        None, description="Extension: keep tokens whose probability is at least this times the highest."
    )
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = Field(
        None, description="Extension: makes tokens that are already in the text less likely; 1 is off."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = Field(None, description="Added to the logits of tokens, by id.")
    ignore_eos: Flag | None = Field(None, description="Extension: go on after tokens that end a text.")
    min_tokens: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="Extension: generate no token that ends the text before so many others."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Extension: tokens that end the text."
    )
    n: Annotated[Whole, Field(ge=1, le=128)] | None = Field(None, description="Answers for each prompt.")
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)] | None = Field(
        None, description="Makes a sample repeatable; the answers of one request take seed, seed + 1, ..."
    )
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and ignored.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """Refuse unknown fields by name, and drop unsupported ones that ask for nothing."""
        if not isinstance(values, dict):
            return values
        left = {}
        for key, value in values.items():
            if key in cls.model_fields:
                left[key] = value
            elif key not in cls.unsupported:
                key = shortened(key)
                _refuse(key, f"unknown field {key!r}; {suggest(key, cls.model_fields)}")
            elif not any(type(value) is type(plain) and value == plain for plain in cls.unsupported[key]):
                _refuse(key, f"{key} is not supported in a {cls.kind}, got {shortened(repr(value))}; leave it out")
        return left

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options", "stream_options needs stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def options(self) -> StreamOptions:
        """Return the stream's options, or their defaults."""
        return self.stream_options or StreamOptions()


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Request.unsupported,
        "suffix": (None, ""),
    }
    kind: ClassVar[Kind] = "completion"
    max_tokens: Annotated[Whole, Field(ge=0)] | None = Field(None, description="0 needs echo.")
    logprobs: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="Log-probability of each token, and so many likeliest ones in its place."
    )
    echo: Flag | None = Field(None, description="Begin the answer with the prompt.")
    best_of: Annotated[Whole, Field(ge=1, le=128)] | None = Field(
        None, description="Generate so many answers for each prompt, and return the n likeliest ones per token."
    )
    prompt: (
        Filled
        | Annotated[list[Filled], Field(min_length=1, max_length=128, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=128, fail_fast=True)]
    )

    @model_validator(mode="after")
    def _what_fits_together(self) -> CompletionRequest:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            _refuse("best_of", f"best_of must be at least n={n}, got {best_of}")
        if best_of is not None and best_of > n and self.stream:
            rule = f"best_of={best_of} cannot be streamed with n={n}: which answers are best is known at their end"
            _refuse("best_of", f"{rule}; leave out stream or best_of")
        if self.max_tokens == 0 and not self.echo:
            _refuse(
                "max_tokens", "max_tokens must be at least 1, or 0 with echo, which returns the prompt alone; got 0"
            )
        return self

    @property
    def limit(self) -> int | None:
        """Return the requested tokens."""
        return self.max_tokens

    @property
    def samples(self) -> int:
        """Return the answers to generate for each prompt."""
        return self.best_of or self.n or 1

    @property
    def top(self) -> tuple[str, int | None]:
        """Return the likeliest tokens to report (None: no log-probabilities), after the name of their field."""
        return "logprobs", self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return the list of prompts, each a text or token ids."""
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else prompt


class Part(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=128, fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        """Return the content with its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Request.unsupported,
        "audio": (None,),
        "best_of": (None, 1),
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "reasoning_effort": (None, "none"),
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "web_search_options": (None,),
    }
    kind: ClassVar[Kind] = "chat"
    logprobs: Flag | None = Field(None, description="Return the log-probability of each token.")
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="Also return those of so many likeliest tokens in its place."
    )
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="Another name for max_tokens."
    )

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            _refuse("max_tokens", "max_tokens and max_completion_tokens are the same limit; give only one")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", f"top_logprobs={self.top_logprobs} needs logprobs: true")
        return self

    @property
    def samples(self) -> int:
        """Return the answers to generate."""
        return self.n or 1

    @property
    def top(self) -> tuple[str, int | None]:
        """Return the likeliest tokens to report (None: no log-probabilities), after the name of their field."""
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Return the requested tokens, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(_Strict):
    """The body of `POST /tokenize`: a prompt or the messages of a chat."""

    model: str | None = Field(None, description="The served model; optional.")
    prompt: Filled | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: Flag = Field(default=True, description="Begin as a prompt of the model does.")
    return_token_strs: Flag = Field(default=False, description="Also return the tokens as text.")

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            _refuse("prompt", "give either prompt, a text, or messages, those of a chat")
        return self


class DetokenizeRequest(_Strict):
    """The body of `POST /detokenize`."""

    model: str | None = Field(None, description="The served model; optional.")
    tokens: Annotated[list[Token], Field(max_length=1 << 20, fail_fast=True)]


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return a sentence for the first of pydantic's errors, and the name of its field."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    place = [part for part in error["loc"] if part != "body"]
    if kind == "json_invalid":
        why = str(context.get("error")).removesuffix(" at")  # as in "Unterminated string starting at"
        return f"the body is not valid JSON: {why} at character {place[0] if place else 0}", None
    if kind == REFUSED:
        return str(context["message"]), str(context["param"])
    if not place:
        return "the body must be a JSON object, sent as Content-Type: application/json", None
    param = shortened(str(place[0]))
    if param in MUST_BE and (place[1:] or kind == "missing"):  # a union: pydantic reports an error for each member
        return f"{param} must be {MUST_BE[param]}", param
    if param == "messages" and place[2:3] == ["content"] and kind != "missing":
        return f"messages.{place[1]}.content must be {CONTENT}", param
    where = ".".join(shortened(str(part)) for part in place)
    if kind == "missing":
        return f"{where} is missing", param
    if kind == "extra_forbidden":
        return f"unknown field {where!r}", param
    rule, value = error["msg"].removeprefix("Input "), error.get("input")
    got = f", got {shortened(repr(value))}" if isinstance(value, str | int | float) else ""
    return f"{where} {rule}{got}", param
