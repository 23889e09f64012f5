"""Decode tokens to text one at a time, without half characters or parts of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"
"""A decoder's replacement for bytes that are not UTF-8, and so for the first bytes of a character."""
_CONTEXT = 8


class TextStream:
    """Decode a stream of tokens to pieces that join to the text of all tokens, up to the first of `stops`.

    A token may end inside a character, or decode differently after another one (a leading space), so text is held back
    until its characters are complete. A possible beginning of a stop string is held back too; no part of a stop string
    is returned. `context` holds the tokens before the stream, such as the prompt. Raises `ValueError` for an empty stop
    string.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.length = 0
        """Characters of the tokens so far, with those that are held back for a stop string."""
        self._stops = StopStrings(stops)
        self._tokens = [int(token) for token in context[-_CONTEXT:]]
        text = self._decode()
        complete = self._complete(text)
        self._boundary = len(self._tokens) if complete == text else 0  # the tokens up to here end at a whole character
        self._shown = len(complete)

    @property
    def stopped(self) -> str | None:
        """Return the stop string that was met, or None; after it, `push` and `finish` return empty texts."""
        return self._stops.stopped

    def push(self, token: int) -> str:
        """Return the text that `token` completes, possibly none."""
        self._tokens.append(int(token))
        text = self._decode()
        complete = self._complete(text)
        new = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        self.length += len(new)
        if complete == text:
            self._forget()
        return self._stops.push(new)

    def finish(self) -> str:
        """Flush the buffered text, as far as it can be decoded."""
        new = self._decode()[self._shown :]
        self._shown += len(new)
        return self._stops.push(new) + self._stops.finish()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens)

    @staticmethod
    def _complete(text: str) -> str:
        return text.rstrip(BROKEN)  # a tokenizer with byte fallback writes one for each byte

    def _forget(self) -> None:
        """Keep only the tokens since the last boundary as context, so that work per token stays constant."""
        del self._tokens[: self._boundary]
        self._boundary = len(self._tokens)
        self._shown = len(self._decode())


class StopStrings:
    """Pass a stream of text on up to the first stop string, without any part of it.

    A possible beginning of a stop string is held back until later text shows whether it is one. If several stop strings
    are complete at the same time, the one that begins first wins. Raises `ValueError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], /) -> None:
        if "" in stops:
            raise ValueError("a stop string must hold at least one character, got an empty one")
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str, /) -> str:
        """Return the text that can be shown after `piece`, possibly none; after a stop string always none."""
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            begin, self.stopped = min(found, key=lambda pair: (pair[0], len(pair[1])))
            self._held = ""
            return text[:begin]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Flush the buffered text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
