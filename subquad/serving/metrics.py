"""Counts for Prometheus, in its text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.version import __version__

if TYPE_CHECKING:
    from subquad.serving.jobs import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
Labels = Mapping[str, str]


class Histogram:
    """Counts of values up to each bound, their sum and their number."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterable[str]:
        """The samples, whose buckets count all smaller values too."""
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield _sample(f"{name}_bucket", total, {"le": bound})
        yield _sample(f"{name}_sum", self.sum)
        yield _sample(f"{name}_count", total)


class Metrics:
    """What the server has done since it started. Used on the event loop only; its size does not grow with requests."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.ends: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN)
        self.next_token = Histogram(NEXT_TOKEN)

    def count_request(self, route: str, method: str, status: int) -> None:
        """An answer with `status`; `route` must be one of a fixed set."""
        self.requests[route, method, status] += 1

    def count_prompts(self, tokens: int) -> None:
        """Tokens of accepted prompts."""
        self.prompt_tokens += tokens

    def count_token(self, seconds: float, later: bool) -> None:
        """A generated token, `seconds` after the one before or, where it is the first, after its request."""
        self.generated_tokens += 1
        (self.next_token if later else self.first_token).add(seconds)

    def count_end(self, reason: str) -> None:
        """The end of a sequence."""
        self.ends[reason] += 1

    def text(self, load: Load, slots: int) -> str:
        """All of it, with the decoder's load as it is now."""
        gauges = {
            "subquad_sequences_running": ("Sequences that are decoded now.", load.running),
            "subquad_sequences_waiting": (
                "Sequences that wait for a slot or whose prompt is being read.",
                load.waiting,
            ),
            "subquad_slots": ("Sequences that can be decoded together.", slots),
            "subquad_slots_free": ("Slots that no sequence holds.", load.free),
            "subquad_state_bytes": ("Bytes of the decoder's state, all slots together.", load.state_bytes),
        }
        if (rss := resident_bytes()) is not None:
            gauges["process_resident_memory_bytes"] = ("Resident memory of the process.", rss)
        lines = [*_head("subquad_build_info", "gauge", "The version that runs.")]
        lines.append(_sample("subquad_build_info", 1, {"version": __version__}))
        lines += _head("subquad_requests_total", "counter", "HTTP requests by route, method and status.")
        for (route, method, status), count in sorted(self.requests.items()):
            labels = {"route": route, "method": method, "status": str(status)}
            lines.append(_sample("subquad_requests_total", count, labels))
        lines += _head("subquad_sequences_ended_total", "counter", "Sequences by what ended them.")
        lines += [_sample("subquad_sequences_ended_total", n, {"reason": why}) for why, n in sorted(self.ends.items())]
        for kind, count in (("prompt", self.prompt_tokens), ("generated", self.generated_tokens)):
            lines += _head(f"subquad_{kind}_tokens_total", "counter", f"Tokens: {kind}.")
            lines.append(_sample(f"subquad_{kind}_tokens_total", count))
        for name, (help_text, value) in gauges.items():
            lines += [*_head(name, "gauge", help_text), _sample(name, value)]
        lines += _head("subquad_time_to_first_token_seconds", "histogram", "From a request to its first token.")
        lines += self.first_token.lines("subquad_time_to_first_token_seconds")
        lines += _head("subquad_time_per_token_seconds", "histogram", "From a sequence's token to its next.")
        lines += self.next_token.lines("subquad_time_per_token_seconds")
        return "\n".join(lines) + "\n"


def resident_bytes() -> int | None:
    """Resident memory of this process; None where there is no /proc."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.is_file() else None


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _sample(name: str, value: float, labels: Labels | None = None) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in (labels or {}).items())
    return f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
