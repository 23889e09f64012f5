"""Text from tokens, one at a time, that never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are not UTF-8, so also for the first bytes of a character."""
_CONTEXT = 8


class TextStream:
    """Decode a stream of tokens so that the pieces, joined, are the text of all of them.

    A token may end inside a character, or decode differently after another (a leading space): text is held back until
    its characters are complete. `context` holds the tokens that stand before the stream, the prompt's for example.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = [int(token) for token in context[-_CONTEXT:]]
        text = self._decode()
        complete = self._complete(text)
        self._boundary = len(self._tokens) if complete == text else 0  # so many tokens end at a complete character
        self._shown = len(complete)

    def push(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        self._tokens.append(int(token))
        text = self._decode()
        complete = self._complete(text)
        new = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text:
            self._forget()
        return new

    def finish(self) -> str:
        """What was held back, as far as it can be decoded."""
        new = self._decode()[self._shown :]
        self._shown += len(new)
        return new

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
