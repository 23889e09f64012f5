"""Command line of `python -m benchmarks`: time operators, models and decoding beside SDPA and other libraries."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from rich.text import Text

from benchmarks.config import (
    DTYPES,
    BenchConfig,
    DecodeConfig,
    LayersConfig,
    ModelConfig,
    OpsConfig,
    PrecisionConfig,
    PrecisionSpeedConfig,
)
from benchmarks.decode import check_decode, measure_decode
from benchmarks.layers import check_layers, measure_layers
from benchmarks.model import check_model, measure_model
from benchmarks.ops import check_ops, measure_ops
from benchmarks.plots import save
from benchmarks.precision import check_precision, measure_precision
from benchmarks.precision_speed import check_precision_speed, measure_precision_speed
from benchmarks.report import Report, notes
from subquad.cli import guarded
from subquad.cli.arguments import Parser
from subquad.cli.rich_table import console
from subquad.cli.tables import print_table
from subquad.config import suggest
from subquad.options import options

OVERVIEW = """\
usage: python -m benchmarks WHAT [options]

Measure time and memory on this machine. Each time is the median of interleaved repeats in one process.

what:
  ops      operators, forward and backward, beside causal SDPA and other libraries
  layers   whole attention layers of every causal mechanism, beside full attention
  model    training steps and prefill of whole decoders, beside transformers' Llama
  decode   one token after contexts of several lengths, beside transformers' Llama and steps written by hand
  precision        errors of states and weights in float16, bfloat16 and int8, against the length of the text
  precision_speed  tokens/s of weights in float16, bfloat16 and int8, at about 20 and 100 million parameters

  python -m benchmarks ops --tokens 1024,4096 --out results
  python -m benchmarks ops --mechanisms latte --latents 16,32,64,128,256
  python -m benchmarks model --mechanisms full,llp --tokens 2048
  python -m benchmarks decode --mechanisms llp,latte --contexts 1000,100000 --compile

`python -m benchmarks WHAT --help` lists the options. Files are written only with --out FOLDER.
"""
BENCHMARKS: dict[str, tuple[type[BenchConfig], Callable[[Any], None], Callable[..., Report]]] = {
    "ops": (OpsConfig, check_ops, measure_ops),
    "layers": (LayersConfig, check_layers, measure_layers),
    "model": (ModelConfig, check_model, measure_model),
    "decode": (DecodeConfig, check_decode, measure_decode),
    "precision": (PrecisionConfig, check_precision, measure_precision),
    "precision_speed": (PrecisionSpeedConfig, check_precision_speed, measure_precision_speed),
}
_DECODER = {"layers": 12, "dim": 768, "heads": 12, "vocab": 32768}
ON_GPU: dict[str, dict[str, Any]] = {
    "ops": {"dtype": "bfloat16"},
    "layers": {"dtype": "bfloat16"},
    "model": _DECODER,
    "decode": {"dtype": "bfloat16", **_DECODER, "contexts": [1000, 10000, 100000]},
    "precision": {},
    "precision_speed": {},
}
"""Defaults on a GPU that differ from those on a CPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return guarded(run, sys.argv[1:] if arguments is None else arguments)


def run(arguments: Sequence[str]) -> int:
    """Parse, measure and print. Return 1 if a case of this library failed, 2 for a wrong benchmark name."""
    what = arguments[0] if arguments else ""
    if what in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if what not in BENCHMARKS:
        message = f"unknown benchmark {what!r}; {suggest(what, BENCHMARKS)}" if what else "no benchmark named"
        sys.stderr.write(f"error: {message}\nsee python -m benchmarks --help\n")
        return 2
    parser, (_, check, measure) = make_parser(what), BENCHMARKS[what]
    chosen = parser.parse_args(arguments[1:])
    with parser.checking():
        config = _config(what, chosen)
        check(config)
    report = measure(config, shown=True, command=shlex.join(["python", "-m", "benchmarks", *arguments]))
    _show(report, markdown=chosen.markdown)
    if chosen.out is not None:
        files = [report.save(chosen.out), *(save(report, Path(chosen.out)) if chosen.plots else [])]
        sys.stdout.write("".join(f"{file}\n" for file in files))
    return 1 if report.failures else 0


def _config(what: str, chosen: Namespace) -> BenchConfig:
    """Return the configuration with the given options. Raise the configuration's `ValueError` or `TypeError`."""
    default = BENCHMARKS[what][0]()
    given = {name: value for name in default.to_dict() if (value := chosen[name]) is not None and value != {}}
    for name, text in given.items():
        if isinstance(getattr(default, name), list) or name == "peers":
            given[name] = _listed(name, text)
    if str(given.get("device", "cpu")).startswith("cuda"):
        given = {**ON_GPU[what], **given}
    return BENCHMARKS[what][0](**given)


def _listed(name: str, text: str) -> Any:
    """Split `a,b,c` into a list, of integers if `name` holds numbers; return `auto` and `none` unchanged."""
    if name == "peers" and text in ("auto", "none"):
        return text
    parts = text.split(",")
    if name not in ("tokens", "latents", "segment", "contexts"):
        return parts
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{name} must be integers separated by commas, such as 1024,4096, got {text!r}") from None


def _show(report: Report, *, markdown: bool) -> None:
    for title, headers, lines in report.grids():
        print_table(title, headers, lines, markdown=markdown)
    for note in notes(report):
        console().print(Text(note))


def make_parser(what: str) -> Parser:
    """Return the parser of a benchmark: its configuration's fields and the output options."""
    name, (config, _, measure) = f"python -m benchmarks {what}", BENCHMARKS[what]
    description = (measure.__doc__ or "").partition("\n")[0]
    parser = Parser(description=description, prog=name, usage=f"{name} [options]")
    helps = {option: meaning for option, _, _, meaning in options(config)}
    for option, default in config().to_dict().items():  # lists are given as a,b,c
        if option == "options":
            parser.add_options("Options of a mechanism, such as --options.llp.segment 512.")
            continue
        if isinstance(default, bool):
            parser.add_argument(f"--{option}", action="store_true", help=helps[option])
            continue
        kind: Any = str if isinstance(default, list | str) else float if isinstance(default, float) else int
        on_gpu = ON_GPU[what].get(option, default)
        shown = _shown(default) + (f"; on a GPU {_shown(on_gpu)}" if on_gpu != default else "")
        text = helps[option].removesuffix(".") + (f" (default: {shown})." if shown else ".")
        parser.add_argument(f"--{option}", type=(Literal[DTYPES] if option == "dtype" else kind) | None, help=text)
    out = "Folder for JSON and pictures (default: none are written)."
    parser.add_argument("--out", type=str | None, default=None, help=out)
    parser.add_yes_no("plots", "Draw pictures into --out.")
    parser.add_argument("--markdown", action="store_true", help="Print the tables in Markdown.")
    return parser


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, list) else "" if default is None else str(default)
