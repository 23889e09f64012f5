"""Limits of the server."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Limits of the server; a request beyond one is refused with a 4xx status that names the limit."""

    slots: int = 16
    """Sequences decoded together; others wait for a slot."""
    max_prompt: int = 8192
    """Most tokens of a prompt."""
    max_tokens: int = 2048
    """Most tokens generated for a sequence, and the default of a chat."""
    max_seconds: float = 300.0
    """Most seconds from a request's arrival to its end; its sequences then end as if they had reached max_tokens."""
    max_requests: int = 128
    """Most sequences that run or wait, over all requests; beyond it, clients get 429 and retry later."""
    max_logprobs: int = 1 << 18
    """Most log-probabilities of an answer: of each of its tokens, and of the likeliest ones in its place."""
    max_body: int = 1 << 22
    """Most bytes of a request's body."""
    prefill_chunk: int = 256
    """Prompt tokens read between two tokens of the running sequences; prompts are read in pieces of so many."""
    prefix_bytes: int | None = None
    """Most bytes of the host's memory for states after the pieces of prompts. A prompt that begins as an earlier one
    reads only what follows the last piece that is kept. 0 keeps none; None: 1 GiB, or an eighth of memory if less."""
    client_seconds: float = 30.0
    """Seconds for a client to send a request's body, or to accept a piece of the answer, before it is disconnected.
    Connections that never send a whole request head stay open: limit those by a proxy."""
    grace_seconds: float = 10.0
    """Seconds for running sequences to end by themselves when the server is told to stop."""
    cors: str = ""
    """Comma-separated origins whose pages may use the server from a browser; * for all."""

    def __post_init__(self) -> None:
        self.check_least(slots=1, max_prompt=1, max_tokens=1, max_requests=1, max_body=1, prefill_chunk=1)
        self.check_least(max_logprobs=0, prefix_bytes=0)
        for name in ("max_seconds", "client_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace_seconds must be at least 0 and finite, got {self.grace_seconds}")

    @property
    def origins(self) -> list[str]:
        """Return the origins in `cors`."""
        return [origin.strip() for origin in self.cors.split(",") if origin.strip()]

    @property
    def max_context(self) -> int:
        """Return the tokens of the longest sequence, prompt and generated ones."""
        return self.max_prompt + self.max_tokens
