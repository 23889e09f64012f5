"""Log-probabilities in OpenAI's two shapes, and the prompts that an answer repeats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from subquad.generation.logprobs import TokenLogprob
from subquad.generation.stream import TextStream
from subquad.serving.texts import Texts


class Entry(NamedTuple):
    """A token of an answer, which begins at character `offset` of its text.

    `scored` is None for a prompt's first token, which nothing predicts, and for tokens that time left unread.
    """

    token: int
    offset: int
    scored: TokenLogprob | None


class Echo(NamedTuple):
    """A prompt that an answer begins with: its text, its tokens and the characters where they begin."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]

    def entries(self, scored: Sequence[TokenLogprob]) -> list[Entry]:
        """Return an entry for each token; `scored` are those of the second token on, as far as they were read."""
        return [Entry(*entry) for entry in zip_longest(self.tokens, self.offsets, [None, *scored])]


def echo_of(texts: Texts, prompt: str | Sequence[int], tokens: Sequence[int]) -> Echo:
    """Return the echo of a prompt, of which a text is repeated as it was sent and `tokens` are decoded."""
    stream, pieces, offsets = TextStream(texts.tokenizer), [], []
    for token in tokens:
        offsets.append(stream.length)
        pieces.append(stream.push(token))
    return Echo(prompt if isinstance(prompt, str) else "".join(pieces), tokens, offsets)


def completion_logprobs(texts: Texts, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return a completion's field. The likeliest tokens of a place include the chosen one, as vLLM's do."""
    likely: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.scored is None:
            likely.append(None)
            continue
        found: dict[str, float] = {}
        for token, logprob in [*entry.scored.top, entry.scored[:2]]:
            found.setdefault(texts.token(token).text, logprob)  # of tokens with the same text the likeliest
        likely.append(found)
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [None if entry.scored is None else entry.scored.logprob for entry in entries],
        "tokens": [texts.token(entry.token).text for entry in entries],
        "top_logprobs": likely,
    }


def chat_logprobs(texts: Texts, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return a chat's field."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        found = texts.token(token)
        return {"token": found.text, "logprob": logprob, "bytes": None if found.utf8 is None else list(found.utf8)}

    content = [
        {**item(*entry.scored[:2]), "top_logprobs": [item(*likely) for likely in entry.scored.top]}
        for entry in entries
        if entry.scored is not None
    ]
    return {"content": content, "refusal": None}
