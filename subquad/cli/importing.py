"""`subquad import`: convert a transformers or llama2.c model into a subquad model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from subquad.bars import READING, waiting
from subquad.checksums import check_unchanged
from subquad.cli.arguments import Parser
from subquad.cli.exporting import check_new, write_model
from subquad.data.llama2c import read_llama2c_tokenizer
from subquad.data.special_tokens import CONFIG, NAMES, name_special_tokens, tokenizer_config
from subquad.data.tokenizers import check_vocabulary, encode_text, has_tokenizer, load_tokenizer
from subquad.program import command

PROMPT = "Once upon a time"
TOKENIZER_HELP = "A tokenizer.json, a folder with one, or llama2.c's tokenizer.bin. null: the tokenizer in MODEL."


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "import MODEL --out FOLDER",
        "Convert a transformers model (Llama, Mistral, Ministral, Qwen2, Qwen3, GPT-2, GPT-NeoX, Mamba-2, Granite 4 "
        "hybrids, Bamba, Qwen3.5, Qwen3-Next) or a llama2.c checkpoint into a subquad model: same weights, same "
        "logits. generate, eval, audit and serve read the result.",
    )
    parser.add_argument(
        "model", type=str, help="Folder of a transformers model, its name on the Hugging Face hub, or a llama2.c .bin."
    )
    parser.add_argument("--out", type=str, required=True, help="Folder to write: new or empty.")
    parser.add_optional("--tokenizer", TOKENIZER_HELP)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, convert and write; return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking(), waiting(READING):
        target = check_new(chosen.out)
        model = _model(chosen.model)
        tokenizer = _tokenizer(chosen.model, chosen.tokenizer)
        if tokenizer is not None:
            check_vocabulary(tokenizer, model.config.vocab_size, "give the model's own by --tokenizer")
        from subquad.hf.loading import check_finite

        check_finite(model, chosen.model)
    source = Path(chosen.model)
    texts: dict[str, str] = {}
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
        own = source.is_dir() and (source / CONFIG).is_file() and chosen.tokenizer is None
        if not own:
            texts[CONFIG] = json.dumps(_settings(model, tokenizer), indent=2) + "\n"
    else:
        sys.stderr.write(f"{chosen.model} has no tokenizer, which generate, eval and serve need: use --tokenizer\n")
    write_model(target, model, texts, source if source.is_dir() and chosen.tokenizer is None else None)
    count = model.decoder.num_parameters()
    sys.stdout.write(f"{chosen.out} holds the model, {count:,} parameters.\n")
    if tokenizer is not None:
        line = command("generate", chosen.out, "--prompt", _prompt(tokenizer))
        sys.stdout.write(f"Continue a text with:\n  {line}\n")
    return 0


def _prompt(tokenizer: Tokenizer) -> str:
    """Return the beginning of a text that the tokenizer knows: English, else the first of its tokens that will do."""
    for text in (PROMPT, *(tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))):
        with suppress(ValueError):
            if encode_text(tokenizer, text) and not text.startswith("-"):  # of an option, or for standard input
                return text
    return PROMPT


def _model(name: str) -> Any:
    from transformers.utils.logging import disable_progress_bar

    from subquad.hf import from_transformers
    from subquad.hf.llama2c import is_llama2c, read_llama2c

    disable_progress_bar()
    check_unchanged(name)
    return read_llama2c(name) if is_llama2c(name) else from_transformers(name)


def _tokenizer(model: str, asked: str | None) -> Tokenizer | None:
    """Return the tokenizer named by `asked`, else the model's own, else None."""
    if asked is not None:
        return read_llama2c_tokenizer(asked) if asked.endswith(".bin") else load_tokenizer(asked)
    source = Path(model)
    if source.is_file():
        return None
    if source.is_dir():
        return load_tokenizer(source) if has_tokenizer(source) else None
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer: Tokenizer = theirs.backend_tokenizer
    name_special_tokens(tokenizer, {name: text for name in NAMES if (text := getattr(theirs, name)) is not None})
    return tokenizer


def _settings(model: Any, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of `tokenizer_config.json`; the model names the special tokens that the tokenizer doesn't."""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        ids = getattr(model.config, f"{name}_id")
        first = ids[0] if isinstance(ids, list) else ids
        if first is not None and (text := tokenizer.id_to_token(first)) is not None:
            tokens[name] = text
    name_special_tokens(tokenizer, tokens)
    return tokenizer_config(tokenizer)
