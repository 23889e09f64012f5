"""Count the server's work for Prometheus."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from subquad.generation.prefix_cache import PrefixCounts
from subquad.version import __version__

__all__ = ["CONTENT_TYPE", "Load", "Metrics"]
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Load(NamedTuple):
    """The decoder's current work."""

    running: int
    waiting: int
    free: int
    state_bytes: int
    prefixes: PrefixCounts = PrefixCounts()


class Metrics:
    """Metrics of the server since its start, and of the process; memory does not grow with requests."""

    def __init__(self) -> None:
        disable_created_metrics()  # they would add a series with a creation time to each metric
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        gauge("subquad_build_info", "Version of the server.", ["version"]).labels(__version__).set(1)
        labels = ("route", "method", "status")
        self._requests = counter("subquad_requests", "HTTP requests by route, method and status.", labels)
        self._ends = counter("subquad_sequences_ended", "Ended sequences by reason.", ["reason"])
        self._prompt_tokens = counter("subquad_prompt_tokens", "Tokens of accepted prompts.")
        self._generated_tokens = counter("subquad_generated_tokens", "Generated tokens.")
        self._running = gauge("subquad_sequences_running", "Sequences that are being decoded.")
        waiting = "Sequences that wait for a slot or whose prompt is being read."
        self._waiting = gauge("subquad_sequences_waiting", waiting)
        self._slots = gauge("subquad_slots", "Sequences that can be decoded together.")
        self._free = gauge("subquad_slots_free", "Empty slots.")
        self._state = gauge("subquad_state_bytes", "Bytes of the decoder's state, over all slots.")
        tokens = "Tokens of prompts that were not read, as an earlier prompt began with them."
        self._prefix_hits = counter("subquad_prefix_hits", "Prompts that began as an earlier one.")
        self._prefix_misses = counter("subquad_prefix_misses", "Other prompts of at least one whole piece.")
        self._prefix_tokens = counter("subquad_prefix_tokens", tokens)
        self._prefix_evictions = counter("subquad_prefix_evictions", "Kept states that made room for others.")
        self._prefix_bytes = gauge("subquad_prefix_bytes", "Bytes of kept states after the pieces of prompts.")
        self._counted = PrefixCounts()
        first, later = "Seconds from a request to its first token.", "Seconds from a sequence's token to its next."
        self._first_token = histogram("subquad_time_to_first_token_seconds", first, buckets=FIRST_TOKEN)
        self._next_token = histogram("subquad_time_per_token_seconds", later, buckets=NEXT_TOKEN)

    def count_request(self, route: str, method: str, status: int) -> None:
        """Count an answer; `route` must come from a fixed set."""
        self._requests.labels(route, method, str(status)).inc()

    def count_prompts(self, tokens: int) -> None:
        """Count the tokens of accepted prompts."""
        self._prompt_tokens.inc(tokens)

    def count_token(self, seconds: float, later: bool) -> None:
        """Count a generated token, `seconds` after the token before it, or after the request unless `later`."""
        self._generated_tokens.inc()
        (self._next_token if later else self._first_token).observe(seconds)

    def count_end(self, reason: str) -> None:
        """Count the end of a sequence by its reason."""
        self._ends.labels(reason).inc()

    def text(self, load: Load, slots: int) -> str:
        """Return all metrics in Prometheus' text format, with the decoder's current `load`."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._slots.set(slots)
        self._free.set(load.free)
        self._state.set(load.state_bytes)
        now, before = load.prefixes, self._counted
        self._prefix_hits.inc(now.hits - before.hits)
        self._prefix_misses.inc(now.misses - before.misses)
        self._prefix_tokens.inc(now.tokens - before.tokens)
        self._prefix_evictions.inc(now.evictions - before.evictions)
        self._prefix_bytes.set(now.nbytes)
        self._counted = now
        return generate_latest(self.registry).decode()
