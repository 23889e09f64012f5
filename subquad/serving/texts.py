"""Convert text to tokens and back: prompts, chats, and growing sequences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer

from subquad.data.special_tokens import CONFIG, read_special_tokens
from subquad.data.tokenizers import bytes_tokenizer, encode_prompt, encode_text
from subquad.generation.stream import BROKEN
from subquad.parsing import read_json_mapping, read_text
from subquad.training.runs import LoadedRun

PLAIN_STOP = "\nuser:"
"""Stop string of chats without a template: the model would go on with the user's next turn."""

LONG = 16
"""Characters that a token may stand for in any vocabulary, such as a whole unknown word."""

BYTES = bytes_tokenizer().get_vocab()
"""Bytes by the characters that byte-level models spell them with."""


class TokenText(NamedTuple):
    """The text of a token, and its bytes.

    Bytes that are not UTF-8 have a text like `bytes:\\xe2\\x82`, as in OpenAI's API; a token without a text has
    `token_id:7` and no bytes.
    """

    text: str
    utf8: bytes | None


class Template(NamedTuple):
    """A chat template in Jinja, and the special tokens that it may use."""

    source: str
    tokens: dict[str, str]


class Texts:
    """A model's tokenizer, its chat template and its `end_tokens`.

    Without a template a chat is `role: content` lines that end with `assistant:`, and an answer ends before the line
    `user:`.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None = None, end_tokens: frozenset[int] = frozenset()
    ) -> None:
        self._tokens: dict[int, TokenText] = {}
        self.tokenizer, self.template, self.end_tokens = tokenizer, template, end_tokens
        self.longest = max(LONG, *map(len, tokenizer.get_vocab()))
        """Characters of a text for each of its tokens, at most: texts that can't fit are refused unread."""

    @classmethod
    def of(cls, loaded: LoadedRun) -> Self:
        """Return the texts of a model that was loaded from its folder."""
        return cls(loaded.tokenizer, read_template(loaded.folder), loaded.end_tokens)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the tokens of a prompt, after its begin tokens if `begin`. Raises `ValueError` if there are none."""
        tokens = (encode_prompt if begin else encode_text)(self.tokenizer, text)
        if not tokens:
            raise ValueError("the prompt must hold at least one token, got an empty text")
        return tokens

    def token(self, token: int) -> TokenText:
        """Return the text that a token adds inside a text, special tokens included."""
        found = self._tokens.get(token)
        if found is None:
            found = self._tokens[token] = self._token(token)
        return found

    def _token(self, token: int) -> TokenText:
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None:
            return TokenText(f"token_id:{token}", None)
        # Many tokenizers drop a blank before the first token, so the second of two is looked at.
        once, twice = (self.tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        text = twice.removeprefix(once)
        if BROKEN not in text or BROKEN in spelled:
            return TokenText(text, text.encode())
        if fallback := re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelled):
            utf8 = bytes.fromhex(fallback[1])
        elif all(character in BYTES for character in spelled):
            utf8 = bytes(BYTES[character] for character in spelled)
        else:
            return TokenText(spelled, None)
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8), utf8)

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[str, list[str]]:
        """Return a chat's prompt and its format's stop strings; `ValueError` with a refusing template's message."""
        if self.template is None:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return "".join(lines) + "assistant:", [PLAIN_STOP]
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            tokens: dict[str, Any] = dict(self.template.tokens)
            rendered: Any = render_jinja_template(
                conversations=[list(messages)], chat_template=self.template.source, add_generation_prompt=True, **tokens
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return str(rendered[0][0]), []


def read_template(folder: Path) -> Template | None:
    """Return the chat template in `folder`, from `chat_template.jinja` or else `tokenizer_config.json`, or None.

    For a checkpoint, the folder of its run is searched too. Raises `ValueError` for a damaged file.
    """
    folder = folder.resolve()
    homes = [folder, folder.parent.parent] if folder.parent.name == "checkpoints" else [folder]
    for home in homes:
        config, file = home / CONFIG, home / "chat_template.jinja"
        settings = read_json_mapping(config) if config.is_file() else {}
        source = read_text(file) if file.is_file() else _template_of(settings)
        if source is not None:
            return Template(source, read_special_tokens(home))
    return None


def _template_of(settings: dict[str, Any]) -> str | None:
    """Return the field `chat_template`: a text, or the one named `default` in a list of templates."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = [item for item in found if isinstance(item, dict) and item.get("name") == "default"]
        found = next((item.get("template") for item in named), None)
    return found if isinstance(found, str) else None
