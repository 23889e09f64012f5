"""Text from tokens, one at a time: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are not UTF-8, so also for the first bytes of a character."""
_CONTEXT = 8


class TextStream:
    """Decode a stream of tokens so that the pieces, joined, are the text of all of them, up to the first of `stops`.

    A token may end inside a character, or decode differently after another (a leading space): text is held back until
    its characters are complete. So is what may be the beginning of a stop string, of which nothing is ever returned.
    `context` holds the tokens that stand before the stream, the prompt's for example. Raises `ValueError` for an empty
    stop string.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._tokens = [int(token) for token in context[-_CONTEXT:]]
        text = self._decode()
        complete = self._complete(text)
        self._boundary = len(self._tokens) if complete == text else 0  # so many tokens end at a complete character
        self._shown = len(complete)

    @property
    def stopped(self) -> str | None:
        """The stop string that was met, after which `push` and `finish` return empty texts; None before."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which may be empty."""
        self._tokens.append(int(token))
        text = self._decode()
        complete = self._complete(text)
        new = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text:
            self._forget()
        return self._stops.push(new)

    def finish(self) -> str:
        """Return what was held back, as far as it can be decoded."""
        new = self._decode()[self._shown :]
        self._shown += len(new)
        return self._stops.push(new) + self._stops.finish()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens)

    @staticmethod
    def _complete(text: str) -> str:
        return text.rstrip(_BROKEN)  # one for each byte, where a tokenizer falls back to bytes

    def _forget(self) -> None:
        """Keep the tokens since the last boundary as context, so that work a token does not grow."""
        del self._tokens[: self._boundary]
        self._boundary = len(self._tokens)
        self._shown = len(self._decode())


class StopStrings:
    """A filter that passes a stream of text on up to the first stop string, of which nothing is ever shown.

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
        """Return the text that can be shown after `piece`, which may be empty; after the stop string always empty."""
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
        """Return the text that was held back; it has turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
