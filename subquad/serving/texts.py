"""Convert text to tokens and back: prompts, chats, and growing sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer

from subquad.data.special_tokens import CONFIG, read_special_tokens
from subquad.data.tokenizers import encode_prompt, encode_text
from subquad.parsing import read_json_mapping, read_text
from subquad.training.runs import LoadedRun

PLAIN_STOP = "\nuser:"
"""Stop string of chats without a template: the model would go on with the user's next turn."""

LONG = 16
"""Characters that a token may stand for in any vocabulary, such as a whole unknown word."""


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
