"""`python -m benchmarks`: operators, models and decoding, timed beside SDPA and other libraries."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jsonargparse import Namespace
from rich.text import Text

from benchmarks import images
from benchmarks.config import BACKENDS, DTYPES, PASSES, BenchConfig, DecodeConfig, ModelConfig, OpsConfig
from benchmarks.decode import check_decode, measure_decode
from benchmarks.model import check_model, measure_model
from benchmarks.ops import check_ops, measure_ops
from benchmarks.report import Report
from benchmarks.tables import notes
from subquad.cli import guarded
from subquad.cli.arguments import Parser
from subquad.cli.tables import console, print_table
from subquad.config import suggest

OVERVIEW = """\
usage: python -m benchmarks WHAT [options]

Measure times and memory on this machine: medians of repeats that take turns, in one process.

what:
  ops      operators, forward and backward, beside causal SDPA and other libraries
  model    training steps and prefill of whole decoders
  decode   one token after contexts of several lengths, and the state's size
  images   drawing images with trained models, with their state and without

  python -m benchmarks ops --tokens 1024,4096 --out results
  python -m benchmarks ops --mechanisms latte --latents 16,32,64,128,256
  python -m benchmarks model --mechanisms full,llp --tokens 2048
  python -m benchmarks decode --mechanisms llp,latte --contexts 1000,100000

`python -m benchmarks WHAT --help` lists the options. Nothing is written without --out FOLDER.
"""
ON_GPU: dict[str, dict[str, Any]] = {
    "ops": {"dtype": "bfloat16"},
    "model": {"dtype": "bfloat16", "layers": 12, "dim": 768, "heads": 12, "vocab": 32768},
    "decode": {
        "dtype": "bfloat16",
        "layers": 12,
        "dim": 768,
        "heads": 12,
        "vocab": 32768,
        "contexts": [1000, 10000, 100000],
    },
}
"""Defaults on a GPU, where they are others."""
LISTS = ("mechanisms", "tokens", "latents", "segment", "contexts", "backends", "passes", "peers")
NUMBERS = ("tokens", "latents", "segment", "contexts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    return guarded(run, sys.argv[1:] if arguments is None else arguments)


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print; the exit status is 1 where something of ours failed."""
    what = arguments[0] if arguments else ""
    if what in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if what == "images":
        return images.run(arguments[1:])
    if what not in PARSERS:
        message = f"unknown benchmark {what!r}; {suggest(what, [*PARSERS, 'images'])}" if what else "no benchmark named"
        sys.stderr.write(f"error: {message}\nsee python -m benchmarks --help\n")
        return 2
    parser = PARSERS[what]()
    chosen = parser.parse_args(arguments[1:])
    with parser.checking():  # nothing is measured here
        measure, config = _prepared(what, chosen)
    report = measure(config, shown=True, command=shlex.join(["python", "-m", "benchmarks", *arguments]))
    _show(report, markdown=chosen.markdown)
    if chosen.out is not None:
        files = report.save(chosen.out, plots=chosen.plots)
        sys.stdout.write("".join(f"{file}\n" for file in files))
    return 1 if report.failures else 0


def _prepared(what: str, chosen: Namespace) -> tuple[Callable[..., Report], BenchConfig]:
    """What measures, and its configuration, checked. Raises as the checks do."""
    given = {name: value for name, value in chosen.as_dict().items() if value is not None and value != {}}
    for name in ("out", "plots", "markdown"):
        given.pop(name, None)
    for name in LISTS:
        if name in given:
            given[name] = _listed(name, given[name])
    if str(given.get("device", "cpu")).startswith("cuda"):
        given = {**ON_GPU[what], **given}
    if what == "ops":
        ops = OpsConfig(**given)
        check_ops(ops)
        return measure_ops, ops
    if what == "model":
        model = ModelConfig(**given)
        check_model(model)
        return measure_model, model
    decode = DecodeConfig(**given)
    check_decode(decode)
    return measure_decode, decode


def _listed(name: str, text: str) -> Any:
    """`a,b,c` as a list, of whole numbers where they are numbers; `auto` and `none` as they are."""
    if name == "peers" and text in ("auto", "none"):
        return text
    parts = text.split(",")
    if name not in NUMBERS:
        return parts
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise ValueError(f"{name} must be whole numbers, as in 1024,4096, got {text!r}") from None


def _show(report: Report, *, markdown: bool) -> None:
    for title, headers, lines in report.grids():
        print_table(title, headers, lines, markdown=markdown)
    for note in notes(report):
        console().print(Text(note))


def _parser(what: str, description: str) -> Parser:
    """The options that all three have."""
    name = f"python -m benchmarks {what}"
    parser = Parser(description=description, prog=name, usage=f"{name} [options]")
    parser.add_argument("--mechanisms", type=str | None, default=None, help="Mechanisms, as a,b,c.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu or cuda.")
    dtype = "Of inputs, or of products under autocast (default: float32, on a GPU bfloat16)."
    parser.add_argument("--dtype", type=Literal[DTYPES] | None, default=None, help=dtype)
    parser.add_argument(
        "--repeats", type=int | None, default=None, help="Timed calls of each case (default: what fits into --seconds)."
    )
    parser.add_argument("--seconds", type=float | None, default=None, help="For the repeats of a length (default: 20).")
    parser.add_argument(
        "--out", type=str | None, default=None, help="A folder to write JSON, CSV and pictures to (default: nowhere)."
    )
    parser.add_yes_no("plots", "Whether to draw pictures into --out.")
    parser.add_argument("--markdown", action="store_true", help="Print the tables in Markdown.")
    return parser


def _sizes(parser: Parser, *names: tuple[str, str]) -> None:
    for name, help_text in names:
        parser.add_argument(f"--{name}", type=int | None, default=None, help=help_text)


def _ops_parser() -> Parser:
    parser = _parser("ops", "Time operators without projections, beside causal SDPA and other libraries.")
    parser.add_argument("--tokens", type=str | None, default=None, help="Lengths (default: 1024,4096,16384).")
    parser.add_argument("--latents", type=str | None, default=None, help="Latte's, of a head, as 16,64 (default: 64).")
    segment = "LLP's segment, which is the window's width too, as 256,512 (default: 256)."
    parser.add_argument("--segment", type=str | None, default=None, help=segment)
    parser.add_argument("--passes", type=str | None, default=None, help=f"Of {', '.join(PASSES)}, as a,b.")
    backends = f"Backends of our engines, each a line, as a,b: {', '.join(BACKENDS)} (default: as the engine chooses)."
    parser.add_argument("--backends", type=str | None, default=None, help=backends)
    _peers(parser)
    _sizes(
        parser,
        ("batch", "Sequences (default: 1)."),
        ("batch_tokens", "Tokens of all sequences together, instead of --batch."),
        ("heads", "Heads (default: 8)."),
        ("channels", "Channels of a head (default: 64)."),
    )
    return parser


def _model_parser() -> Parser:
    parser = _parser("model", "Time training steps (no optimizer) and prefill of decoders.")
    parser.add_argument("--tokens", type=str | None, default=None, help="Lengths (default: 1024,4096).")
    _peers(parser)
    _sizes(
        parser,
        ("batch", "Sequences (default: 1)."),
        ("batch_tokens", "Tokens of all sequences together, instead of --batch."),
    )
    _decoder(parser)
    return parser


def _decode_parser() -> Parser:
    parser = _parser("decode", "Time one token after contexts of several lengths.")
    contexts = "Tokens read before (default: 1000,4000,16000; on a GPU 1000,10000,100000)."
    parser.add_argument("--contexts", type=str | None, default=None, help=contexts)
    _sizes(
        parser,
        ("batch", "Sequences that decode together (default: 1)."),
        ("piece", "Tokens that are read at a time (default: 2048)."),
    )
    _decoder(parser)
    return parser


def _peers(parser: Parser) -> None:
    text = "auto (other libraries that are installed), none, or names, as a,b (default: auto)."
    parser.add_argument("--peers", type=str | None, default=None, help=text)


def _decoder(parser: Parser) -> None:
    parser.add_options("Options of mechanisms: --options.llp.segment 512.")
    _sizes(
        parser,
        ("layers", "Layers (default: 2; on a GPU 12)."),
        ("dim", "Model width (default: 128; on a GPU 768)."),
        ("heads", "Heads (default: 2; on a GPU 12)."),
        ("vocab", "Vocabulary (default: 1024; on a GPU 32768)."),
    )


PARSERS: dict[str, Callable[[], Parser]] = {"ops": _ops_parser, "model": _model_parser, "decode": _decode_parser}
