"""What passes between the requests and the thread that decodes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from subquad.generation.config import SamplingConfig

Limit = Literal["tokens", "seconds", "shutdown"]


class BusyError(Exception):
    """The server runs as many sequences as it may."""


class DownError(Exception):
    """The server takes no requests any more: it stops, or its decoder has failed."""


class Load(NamedTuple):
    """What the decoder is doing."""

    running: int
    waiting: int
    free: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """A token of the sequence `index`, its end, or both; `limit` says what ended it with "length".

    `state_bytes` is the state's size at the token; `seconds` is the time of `perf_counter` at which it happened.
    """

    index: int
    token: int | None
    state_bytes: int
    seconds: float
    end: Literal["stop", "length", "error"] | None = None
    limit: Limit | None = None
    error: Exception | None = None


class Job:
    """The sequences of one request; `events` holds what happens to them until the last has ended."""

    def __init__(self, prompts: Sequence[tuple[Sequence[int], SamplingConfig]], stop_tokens: Collection[int]) -> None:
        self.prompts = prompts
        self.stop_tokens = stop_tokens
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.open = set(range(len(prompts)))
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin = time.perf_counter()
        self.last: dict[int, float] = {}
        self.timer: asyncio.TimerHandle | None = None
