"""The server's limits."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Limits of the server; what is beyond one is refused with a 4xx that names it."""

    slots: int = 16
    """Sequences that are decoded together; more wait for a slot."""
    max_prompt: int = 8192
    """Tokens of a prompt."""
    max_tokens: int = 2048
    """Tokens generated for one sequence; what a chat gets that asks for no number."""
    max_seconds: float = 300.0
    """From a request's arrival to its end; then a sequence ends as if it had reached its tokens."""
    max_requests: int = 128
    """Sequences that run or wait, of all requests; then clients are asked to try again later (429)."""
    max_body: int = 1 << 22
    """Bytes of a request."""
    prefill_chunk: int = 512
    """Tokens of a prompt that are read between two tokens of the running sequences."""
    client_seconds: float = 30.0
    """For a client to send a request's body, or to take a piece of the answer, before it is given up. A connection that
    sends no whole head of a request stays open: a proxy in front limits those."""
    grace_seconds: float = 10.0
    """For running sequences to end by themselves when the server is told to stop."""
    cors: str = ""
    """Origins whose pages may use the server from a browser, with commas between them; * for all."""

    def __post_init__(self) -> None:
        self.check_least(slots=1, max_prompt=1, max_tokens=1, max_requests=1, max_body=1, prefill_chunk=1)
        for name in ("max_seconds", "client_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace_seconds must be at least 0 and finite, got {self.grace_seconds}")

    @property
    def origins(self) -> list[str]:
        """The origins in `cors`."""
        return [origin.strip() for origin in self.cors.split(",") if origin.strip()]

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence: its prompt and what is generated."""
        return self.max_prompt + self.max_tokens
