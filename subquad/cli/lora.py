"""`subquad lora`: adapters below a folder, an adapter merged into its base, and the LoRA experiment on MNIST."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

from subquad.cli.arguments import Parser, check_output
from subquad.config import suggest
from subquad.tools._lora_mnist_config import MnistConfig

OVERVIEW = """\
usage: subquad lora list [FOLDER ...]
       subquad lora merge RUN --out FOLDER
       subquad lora mnist --path FOLDER --out FILE

  list    adapters below folders (default: runs): base, rank, layers, size, and whether they fit
  merge   write a run's adapter and its base as one plain model
  mnist   the LoRA experiment on MNIST: full fine-tuning, ranks 1 to 64, from scratch

`subquad train --lora.rank 8 --lora.base RUN` trains an adapter; eval, generate and serve read its folder.
"""


def run(arguments: Sequence[str]) -> int:
    """Parse, do what the first word says, return the exit status."""
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if word not in ACTIONS:
        message = f"unknown action {word!r}; {suggest(word, ACTIONS)}" if word else "no action"
        sys.stderr.write(f"error: {message}\nsee subquad lora --help\n")
        return 2
    return ACTIONS[word](arguments[1:])


def make_parser(action: str) -> Parser:
    """The options of `list`, `merge` or `mnist`."""
    if action == "list":
        parser = Parser("lora list [FOLDER ...]", "Show the adapters below folders.")
        parser.add_argument("folders", type=str, nargs="*", default=["runs"], help="Folders to look in.")
        parser.add_argument("--markdown", action="store_true", help="Print the table alone, in Markdown.")
        parser.add_argument("--json", type=str | None, default=None, help="Also write the numbers to this file.")
    elif action == "merge":
        parser = Parser("lora merge RUN --out FOLDER", "Write an adapter and its base as one plain model.")
        parser.add_argument("run", type=str, help="The folder of a run that trained an adapter, or of a checkpoint.")
        parser.add_argument("--out", type=str, required=True, help="The folder for the merged model: a new one.")
        parser.add_argument("--base", type=str | None, default=None, help="The base's folder, where it was moved.")
    else:
        parser = Parser(
            "lora mnist --path FOLDER",
            "Repeat the report's LoRA experiment on MNIST and print its tables beside the report's numbers. An "
            "experiment that was interrupted goes on when the same command is given again.",
        )
        parser.add_files()
        parser.add_class_arguments(MnistConfig, None, as_group=False)
        add = parser.add_argument
        add("--out", type=str, default="lora-mnist.json", help="The file of the results, which is gone on with.")
        add("--markdown", type=str | None, default=None, help="Also write the tables to this file.")
        add("--plot", type=str | None, default=None, help="Draw accuracy against rank to this file (.png, .svg).")
        add("--tune", action="store_true", help="Choose the learning rates on training images, print them, and end.")
    return parser


def _list(arguments: Sequence[str]) -> int:
    parser = make_parser("list")
    chosen = parser.parse_args(arguments)
    from subquad.cli import _lora_folders

    with parser.checking():
        check_output("json", chosen.json)
        found = _lora_folders.adapters(chosen.folders)
    _lora_folders.show(found, markdown=chosen.markdown)
    if chosen.json:
        from subquad.cli.tables import write_json

        write_json(chosen.json, {"adapters": [entry.record() for entry in found]})
    return 0


def _merge(arguments: Sequence[str]) -> int:
    parser = make_parser("merge")
    chosen = parser.parse_args(arguments)
    from subquad.cli import _lora_folders

    with parser.checking():
        merging = _lora_folders.open_merging(chosen.run, chosen.out, chosen.base)
    merging.write()
    command = "audit" if merging.extension else "eval"
    sys.stdout.write(f"{chosen.out} holds the merged model: subquad {command} {chosen.out}\n")
    return 0


def _mnist(arguments: Sequence[str]) -> int:
    from subquad.cli.arguments import files_first

    parser = make_parser("mnist")
    parsed = parser.parse_args(files_first(arguments))
    with parser.checking():
        values = parser.instantiate(parsed)
        config = MnistConfig(**{field.name: values[field.name] for field in fields(MnistConfig)})
        for name in ("out", "markdown", "plot"):
            check_output(name, parsed[name])
            if parsed.tune and parsed[name] != parser.get_default(name):
                raise ValueError(f"--{name} has no effect with --tune, which prints the rates alone; leave it out")
        if parsed.plot and not parsed.plot.lower().endswith((".png", ".svg")):
            raise ValueError(f"--plot must name a .png or .svg file, got {parsed.plot!r}")
    from subquad.tools import _lora_mnist, _lora_mnist_run, _lora_mnist_tables

    with parser.checking():
        digits = _lora_mnist.read_digits(config)
        if parsed.tune:
            _lora_mnist.held_out(digits, config.tune_held_out)
        else:
            _lora_mnist_run.Results.open(config, parsed.out, digits.fingerprint)
    if parsed.tune:
        rates = _lora_mnist_run.tune(config)
        sys.stdout.write(_lora_mnist_tables.rates_yaml(rates))
        return 0
    results = _lora_mnist_run.run(config, parsed.out, digits)
    _lora_mnist_tables.show(results.values, config, parsed.markdown)
    if parsed.plot:
        from subquad.tools._lora_mnist_draw import draw

        draw(results.values, config, parsed.plot)
    return 0


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {"list": _list, "merge": _merge, "mnist": _mnist}
