"""Stop strings in a stream of text; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a stream of text on up to the first stop string, of which nothing is ever shown.

    What may be the beginning of a stop string is held back until it is one or is not. Of stop strings that are complete
    at the same time the one that begins first wins. An empty stop string raises `ValueError`.
    """

    def __init__(self, stops: Sequence[str], /) -> None:
        if "" in stops:
            raise ValueError("a stop string must hold at least one character, got an empty one")
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str, /) -> str:
        """The text that can be shown after `piece`, which may be empty; after the stop string always empty."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, self.stopped = min(found, key=lambda place_and_stop: (place_and_stop[0], len(place_and_stop[1])))
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, which is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
