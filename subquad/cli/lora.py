"""`subquad lora`: list adapters, or merge one into its base."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from subquad import adaptation
from subquad.bars import READING, waiting
from subquad.cli.arguments import Parser, check_output
from subquad.cli.tables import count, print_table, size
from subquad.config import suggest
from subquad.data.files import write_json
from subquad.program import command

HEADERS = ("adapter", "base", "rank", "alpha", "layers", "trained", "share", "on disk", "fits")
SPARE = ("on disk", "layers", "base", "trained", "alpha", "share", "rank")
OVERVIEW = """\
usage: subquad lora list [FOLDER ...]
       subquad lora merge RUN --out FOLDER

  list    list LoRA adapters in folders (default: runs): base, rank, layers, size, and whether they fit their base
  merge   merge the adapter of a run into its base and write a plain model

`subquad train --lora.rank 8 --lora.base RUN` trains an adapter; eval, generate and serve read its folder.
"""


def run(arguments: Sequence[str]) -> int:
    """Run the action named first; return the exit status."""
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if word not in ACTIONS:
        message = f"unknown action {word!r}; {suggest(word, ACTIONS)}" if word else "no action"
        sys.stderr.write(f"error: {message}\nsee {command('lora', '--help')}\n")
        return 2
    return ACTIONS[word](arguments[1:])


def make_parser(action: str) -> Parser:
    """Return the options of `list` or `merge`."""
    if action == "list":
        parser = Parser("lora list [FOLDER ...]", "List the LoRA adapters in folders and their subfolders.")
        parser.add_argument("folders", type=str, nargs="*", default=["runs"], help="Folders to search.")
        parser.add_argument("--markdown", action="store_true", help="Print only the table, in Markdown.")
        parser.add_optional("--json", "Also write the numbers to this JSON file.")
    else:
        parser = Parser("lora merge RUN --out FOLDER", "Merge an adapter into its base and write a plain model.")
        parser.add_argument("run", type=str, help="Folder of a run that trained an adapter, or of its checkpoint.")
        parser.add_argument("--out", type=str, required=True, help="Folder to write; it must not exist.")
        parser.add_optional("--base", "Folder of the base model. null: the folder that the adapter names.")
    return parser


def _list(arguments: Sequence[str]) -> int:
    parser = make_parser("list")
    chosen = parser.parse_args(arguments)
    with parser.checking():
        check_output("json", chosen.json)
        found = adaptation.adapters.adapters(chosen.folders)
    _show(found, markdown=chosen.markdown)
    if chosen.json:
        write_json(chosen.json, {"adapters": [entry.to_dict() for entry in found]})
    return 0


def _show(found: Sequence[adaptation.adapters.Adapter], *, markdown: bool) -> None:
    """Print the table of adapters."""
    lines = [
        (
            entry.folder,
            entry.base,
            str(entry.rank),
            f"{entry.alpha} ({entry.kind})",
            entry.short,
            count(entry.parameters),
            "" if entry.base_parameters is None else f"{entry.parameters / entry.base_parameters:.2%}",
            size(entry.bytes),
            entry.fits,
        )
        for entry in found
    ]
    title, elsewhere = f"{len(found)} adapter{'' if len(found) == 1 else 's'}", " or by --markdown or --json"
    print_table(title, HEADERS, lines, markdown=markdown, spare=SPARE, elsewhere=elsewhere, text="fits")


def _merge(arguments: Sequence[str]) -> int:
    parser = make_parser("merge")
    chosen = parser.parse_args(arguments)
    with parser.checking(), waiting(READING):
        merging = adaptation.adapters.open_merging(chosen.run, chosen.out, chosen.base)
    merging.write()
    measure = "audit" if merging.extension else "eval"
    sys.stdout.write(f"{chosen.out} holds the merged model. Measure it with:\n  {command(measure, chosen.out)}\n")
    return 0


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {"list": _list, "merge": _merge}
