"""`subquad show`: pictures of weights, receptive fields, position terms and costs, as PNG or SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from subquad.cli.arguments import Parser
from subquad.config import suggest
from subquad.evaluation.drawing import SUFFIXES, check_file, save

OVERVIEW = """\
usage: subquad show WHAT [RUN] [options]

Draw a picture, as PNG or SVG. Of fresh mechanisms, or of a trained RUN.

what:
  weights     what each token reads of the others: the matrix that a mechanism is
  reach       how far a token's receptive field reaches after each layer
  positions   what positions add to the logits, in mechanisms with position terms (elita)
  cost        FLOPs and state against length, for all mechanisms

  subquad show weights --attention llp,window --out weights.png
  subquad show weights runs/mine --layer 0 --head 1 --text "def main(argv):" --out head.svg

`subquad show WHAT --help` lists the options.
"""
EXAMPLE_HELP = "The held-out sequence that a classifier RUN reads, from 0 (default: 0)."
RUN_HELP = "The folder of a run, for its trained layers."
LAYER_HELP = "One layer of RUN, from 0; a looped stack counts on from pass to pass (default: all)."


def run(arguments: Sequence[str]) -> int:
    """Parse, draw, write, return the exit status."""
    what = arguments[0] if arguments else ""
    if what in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if what not in PICTURES:
        message = f"unknown picture {what!r}; {suggest(what, PICTURES)}" if what else "no picture named"
        sys.stderr.write(f"error: {message}\nsee subquad show --help\n")
        return 2
    parser = PICTURES[what]()
    chosen = parser.parse_args(arguments[1:])
    with parser.checking():  # nothing is read but arguments and a run
        file = check_file(chosen.out or f"{what}.png")
        from subquad.cli import _pictures

        save(getattr(_pictures, what)(chosen), file)
    sys.stdout.write(f"{file}\n")
    return 0


def _parser(what: str, description: str, *, tokens: int, trained: bool = True) -> Parser:
    """What the pictures of mechanisms have in common."""
    parser = Parser(f"show {what}{' [RUN]' if trained else ''}", description)
    parser.prog = f"subquad show {what}"
    if trained:
        parser.add_argument("run", nargs="?", type=str | None, default=None, help=RUN_HELP)
    parser.add_argument("--attention", type=str | None, default=None, help="Mechanisms, as a,b,c.")
    parser.add_options("Options of mechanisms: --options.llp.segment 16. Ranges are short by default, to be seen.")
    parser.add_argument("--tokens", type=int, default=tokens, help="Tokens, at most.")
    parser.add_argument("--dim", type=int, default=64, help="Model width of fresh layers.")
    parser.add_argument("--heads", type=int, default=2, help="Heads of fresh layers.")
    parser.add_argument("--out", type=str | None, default=None, help=_out_help(what))
    return parser


def _out_help(what: str) -> str:
    return f"The file to write, {' or '.join(SUFFIXES)} (default: {what}.png)."


def _weights_parser() -> Parser:
    parser = _parser("weights", "The weights: a row is a token that reads, a column one that is read.", tokens=48)
    parser.add_argument("--text", type=str | None, default=None, help="The text that a language model RUN reads.")
    parser.add_argument("--example", type=int | None, default=None, help=EXAMPLE_HELP)
    parser.add_argument("--layer", type=int | None, default=None, help=LAYER_HELP)
    parser.add_argument("--head", type=int | None, default=None, help="One head, from 0 (default: all).")
    return parser


def _reach_parser() -> Parser:
    parser = _parser("reach", "The layer that first lets a token depend on an earlier one, in a stack.", tokens=64)
    parser.add_argument("--layers", type=int, default=8, help="Layers of a fresh stack.")
    return parser


def _positions_parser() -> Parser:
    parser = _parser("positions", "What positions alone add to the logits, for all heads and layers.", tokens=256)
    parser.add_argument("--layers", type=int, default=2, help="Fresh layers to draw.")
    return parser


def _cost_parser() -> Parser:
    parser = Parser(
        "show cost", "FLOPs of the mixing and bytes of the state against the tokens, for one layer of each."
    )
    parser.prog = "subquad show cost"
    parser.add_argument("--attention", type=str | None, default=None, help="Mechanisms, as a,b,c; or all.")
    parser.add_options("Options of mechanisms: --options.llp.segment 512.")
    lengths = [2**power for power in range(8, 17)]
    parser.add_argument("--tokens", nargs="+", type=int, default=lengths, help="Lengths.")
    parser.add_argument("--dim", type=int, default=512, help="Model width.")
    parser.add_argument("--heads", type=int, default=8, help="Heads.")
    parser.add_argument("--out", type=str | None, default=None, help=_out_help("cost"))
    return parser


PICTURES: dict[str, Callable[[], Parser]] = {
    "weights": _weights_parser,
    "reach": _reach_parser,
    "positions": _positions_parser,
    "cost": _cost_parser,
}
"""The parser of each picture; the function of the same name in `_pictures` draws it."""
