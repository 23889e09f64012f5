"""`subquad data tokens` and `subquad data check`: make a folder of token shards, and read one through."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from subquad.cli.arguments import Parser
from subquad.cli.tables import console, count, print_table, write_json
from subquad.data.vocabularies import TRAINED

if TYPE_CHECKING:
    from subquad.data.token_set import TokenSet

SHARD_TOKENS = 1 << 27
"""Tokens of a shard: 256 MiB of them at two bytes each."""


def make_parser() -> Parser:
    """The options of `subquad data tokens`."""
    parser = Parser(
        "data tokens PATH ...",
        "Make a folder of token shards of texts of any size, in the memory of one document; `--data.path FOLDER` "
        "trains on it. A path is what `subquad train --data.path` takes: files, folders, globs, archives, hf:NAME.",
    )
    parser.add_argument("paths", type=str, nargs="+", metavar="PATH", help="Texts, in this order.")
    parser.add_argument("--out", type=str, required=True, help="The folder to make; it must not exist.")
    parser.add_argument(
        "--tokenizer",
        type=str,
        default="bytes",
        help="`bytes`, a tokenizer.json, a folder that holds one (a run's, say), or one with GPT-2's two files.",
    )
    parser.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="Tokens after which a shard is closed.")
    parser.add_argument(
        "--skip_bad_files", type=bool, default=False, help="Leave out, with a warning each, files that are not text."
    )
    parser.add_argument("--json", type=str | None, default=None, help="Also write the numbers to this file.")
    return parser


def make_check_parser() -> Parser:
    """The options of `subquad data check`."""
    parser = Parser(
        "data check FOLDER",
        "Read all shards of a folder and compare their checksums with the index; exit status 1 where one is missing or "
        "damaged.",
    )
    parser.add_argument("folder", type=str, help="A folder of token shards.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, make or check, print, return the exit status; the first argument is `tokens` or `check`."""
    command, *rest = arguments
    return _check(rest) if command == "check" else _make(rest)


def _make(arguments: Sequence[str]) -> int:
    parser = make_parser()
    values = parser.parse_args(arguments).as_dict()
    from subquad.data.sources import open_source
    from subquad.data.token_writer import check_target, write_tokens
    from subquad.data.tokenizers import load_tokenizer

    with parser.checking():
        if values["tokenizer"] in TRAINED:
            raise ValueError(
                f"tokenizer {values['tokenizer']!r} is trained on a whole text, which here may be of any size: "
                "train one on a part (`subquad train --data.path PART`) and give its folder"
            )
        check_target(values["out"], values["shard_tokens"])
        tokenizer = load_tokenizer(values["tokenizer"])
        sources = [open_source(path, skip_bad_files=values["skip_bad_files"]) for path in values["paths"]]
    begin = time.perf_counter()
    progress: Any = _show_progress if sys.stderr.isatty() else None
    made = write_tokens(values["out"], sources, tokenizer, shard_tokens=values["shard_tokens"], progress=progress)
    record = _record(made)
    _print(made, record, time.perf_counter() - begin)
    if values["json"] is not None:
        write_json(values["json"], record)
    return 0


def _check(arguments: Sequence[str]) -> int:
    parser = make_check_parser()
    folder = parser.parse_args(arguments).folder
    from subquad.data.token_set import ShardError, TokenSet

    with parser.checking():
        tokens = TokenSet(Path(folder).expanduser())
    bad = 0
    for number in range(len(tokens.entries)):
        try:
            tokens.shard(number)
        except ShardError as error:
            bad += 1
            console().print(Text(str(error)), soft_wrap=True)
    good = len(tokens.entries) - bad
    console().print(Text(f"{good} of {len(tokens.entries)} shards of {folder} are whole"), soft_wrap=True)
    return int(bad > 0)


def _record(tokens: TokenSet) -> dict[str, Any]:
    return {
        "folder": str(tokens.path),
        "shards": len(tokens.entries),
        "tokens": len(tokens),
        "documents": sum(entry.documents for entry in tokens.entries),
        "text_bytes": tokens.text_bytes,
        "words": tokens.words,
        "vocab_size": tokens.vocab_size,
        "fingerprint": tokens.fingerprint,
    }


def _print(tokens: TokenSet, record: dict[str, Any], seconds: float) -> None:
    lines = [(entry.name, count(entry.tokens), f"{entry.documents:,}") for entry in tokens.entries[:20]]
    print_table(str(tokens.path), ("shard", "tokens", "documents"), lines, markdown=False)
    text = (
        f"{record['tokens']:,} tokens of {record['documents']:,} documents in {record['shards']:,} shards, "
        f"{record['vocab_size']:,} in the vocabulary; made in {seconds:.1f} s; fingerprint {record['fingerprint']}"
    )
    console().print(Text(text), soft_wrap=True)
    console().print(Text(shlex.join(["subquad", "train", "--data.path", str(tokens.path)])), soft_wrap=True)


def _show_progress(what: str, done: int, total: int) -> None:
    """One line that counts."""
    sys.stderr.write(f"\r{what}: {done:,} documents")
    sys.stderr.flush()
