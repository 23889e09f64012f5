"""`subquad show`: pictures of weights, receptive fields, position terms and costs, as PNG or SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from torch import Tensor, nn

from subquad import training
from subquad.attention import Attention, mechanism, names
from subquad.cli.arguments import Parser
from subquad.config import check_at_least, suggest
from subquad.data.tokenizers import encode_text
from subquad.evaluation import drawing
from subquad.models import matrices
from subquad.models.costs import layer_costs
from subquad.models.stacks import STACKS
from subquad.training.tasks_classify import labelled

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
COLUMNS = 5
"""Panels in a row."""
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
    make_parser, draw = PICTURES[what]
    parser = make_parser()
    chosen = parser.parse_args(arguments[1:])
    with parser.checking():  # nothing is read but arguments and a run
        file = drawing.check_file(chosen.out or f"{what}.png")
        drawing.save(draw(chosen), file)
    sys.stdout.write(f"{file}\n")
    return 0


def _parser(what: str, description: str, *, tokens: int) -> Parser:
    """Return the options that the pictures of mechanisms have in common."""
    parser = Parser(f"show {what} [RUN]", description)
    parser.prog = f"subquad show {what}"
    parser.add_optional("run", RUN_HELP)
    parser.add_optional("--attention", "Mechanisms, as a,b,c.")
    parser.add_options("Options of mechanisms: --options.llp.segment 16. Ranges are short by default, to be seen.")
    parser.add_argument("--tokens", type=int, default=tokens, help="Tokens, at most.")
    parser.add_argument("--dim", type=int, default=64, help="Model width of fresh layers.")
    parser.add_argument("--heads", type=int, default=2, help="Heads of fresh layers.")
    parser.add_optional("--out", _out_help(what))
    return parser


def _out_help(what: str) -> str:
    return f"The file to write, {' or '.join(drawing.SUFFIXES)} (default: {what}.png)."


def _weights_parser() -> Parser:
    parser = _parser("weights", "The weights: a row is a token that reads, a column one that is read.", tokens=48)
    parser.add_optional("--text", "The text that a language model RUN reads.")
    parser.add_optional("--example", EXAMPLE_HELP, int)
    parser.add_optional("--layer", LAYER_HELP, int)
    parser.add_optional("--head", "One head, from 0 (default: all).", int)
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
    parser.add_optional("--attention", "Mechanisms, as a,b,c; or all.")
    parser.add_options("Options of mechanisms: --options.llp.segment 512.")
    lengths = [2**power for power in range(8, 17)]
    parser.add_argument("--tokens", nargs="+", type=int, default=lengths, help="Lengths.")
    parser.add_argument("--dim", type=int, default=512, help="Model width.")
    parser.add_argument("--heads", type=int, default=8, help="Heads.")
    parser.add_optional("--out", _out_help("cost"))
    return parser


def weights(chosen: Namespace) -> drawing.Figure:
    """The mean over the heads of every fresh mechanism; all heads of a single one; or those of a trained model."""
    check_at_least(1, "--", tokens=chosen.tokens)
    if chosen.run is not None:
        return _trained_weights(chosen)
    for name in ("layer", "text", "example"):
        if chosen[name] is not None:
            raise ValueError(f"--{name} is for a trained model: name the folder of a run")
    asked = _asked(chosen, names())
    panels = []
    for name in asked:
        layer = _fresh(chosen, name, parts=4)
        w_HTS = matrices.fresh_weights(layer, chosen.tokens)
        if len(asked) == 1 or chosen.head is not None:
            heads = [(f"{name}, head {h}", w_HTS[h].numpy()) for h in _heads(chosen, w_HTS)]
            panels += [drawing.Weights(title, w_TS, layer.causal) for title, w_TS in heads]
        else:
            panels.append(drawing.Weights(name, w_HTS.mean(0).numpy(), layer.causal))
    return drawing.draw_weights(drawing.in_rows(panels, COLUMNS))


def _trained_weights(chosen: Namespace) -> drawing.Figure:
    _only_fresh(chosen)
    read = _reading_example if training.runs.is_classifier(chosen.run) else _reading_text
    model, tokens_T, shown_T = read(chosen)
    layers = matrices.trained_weights(model, tokens_T)
    shown = range(len(layers)) if chosen.layer is None else [_in_range("layer", chosen.layer, len(layers))]
    grid = []
    for i in shown:
        layer, w_HTS = layers[i]
        row = f"layer {i}: {layer.name}"
        grid.append([drawing.Weights(f"head {h}", w_HTS[h].numpy(), layer.causal, row) for h in _heads(chosen, w_HTS)])
    return drawing.draw_weights(grid, tokens=shown_T)


def _reading_text(chosen: Namespace) -> tuple[nn.Module, list[int], list[str]]:
    """A language model, the tokens of `--text`, and each of them as text."""
    if chosen.example is not None:
        raise ValueError("--example is for a classifier; give the text that the model reads, by --text")
    if chosen.text is None:
        raise ValueError("give the text that the model reads, by --text")
    loaded = training.runs.load_run(chosen.run, "cpu")
    tokens_T = encode_text(loaded.tokenizer, chosen.text)[: chosen.tokens]
    if not tokens_T:
        raise ValueError(f"--text must hold a token, got {chosen.text!r}")
    return loaded.decoder, tokens_T, [loaded.tokenizer.decode([token]) for token in tokens_T]


def _reading_example(chosen: Namespace) -> tuple[nn.Module, list[int], list[str]]:
    """A classifier, the tokens of a held-out sequence of its task, and what stands in its rows: their numbers."""
    if chosen.text is not None:
        raise ValueError("--text is for a language model; a classifier reads a sequence of its task, by --example")
    loaded = training.runs.load_classifier(chosen.run, "cpu")
    if loaded.config is None:
        raise ValueError(f"{loaded.folder} has no config.yaml that names the sequences of its task")
    items: Any = labelled(loaded.config).held_out
    item = items[_in_range("example", chosen.example or 0, len(items))]
    tokens_T = item["input_ids"][item["attention_mask"] > 0].tolist()[: chosen.tokens]
    first = ["class"] if loaded.config.classify.pooling == "class" else []
    return loaded.model, tokens_T, [*first, *map(str, tokens_T)]


def reach(chosen: Namespace) -> drawing.Figure:
    """Fresh stacks of one mechanism each, or the layers of a trained model."""
    check_at_least(1, "--", tokens=chosen.tokens)
    if chosen.run is not None:
        layers = _layers(chosen)
        return drawing.draw_reach([_reach(Path(chosen.run).name, layers, chosen.tokens)], layers=len(layers))
    check_at_least(1, "--", layers=chosen.layers)
    stacks = [
        _reach(name, [_fresh(chosen, name, parts=8)] * chosen.layers, chosen.tokens) for name in _asked(chosen, names())
    ]
    if not chosen.attention:  # what one layer connects at once is the same picture for all
        stacks = [stack for stack in stacks if stack.first[-1].max() > 1 or not stack.first[-1].all()] or stacks[:1]
    return drawing.draw_reach(stacks, layers=chosen.layers)


def _reach(title: str, layers: Sequence[Attention], tokens: int) -> drawing.Reach:
    allowed = {layer: matrices.allowed(layer, tokens) for layer in layers}
    reached = list(matrices.reach(allowed[layer] for layer in layers))
    return drawing.Reach(title, matrices.first_layer(reached).numpy(), all(layer.causal for layer in layers))


def positions(chosen: Namespace) -> drawing.Figure:
    """Rows are layers (of a trained model, those that have position terms), columns heads."""
    check_at_least(1, "--", tokens=chosen.tokens, layers=chosen.layers)
    if chosen.run is not None:
        numbered = list(enumerate(_layers(chosen)))
        numbered = [entry for entry in numbered if matrices.has_positions(entry[1])] or numbered
    else:
        having = [name for name in names() if matrices.has_positions(mechanism(name))]
        asked = [(name, seed) for name in _asked(chosen, having) for seed in range(chosen.layers)]
        numbered = [(seed, _fresh(chosen, name, parts=4, seed=seed)) for name, seed in asked]
    grid = []
    for i, layer in numbered:
        terms_HTS = matrices.position_terms(layer, chosen.tokens).numpy()
        grid.append([drawing.Panel(t_TS, f"head {h}", f"layer {i}") for h, t_TS in enumerate(terms_HTS)])
    return drawing.draw_positions(grid)


def cost(chosen: Namespace) -> drawing.Figure:
    """One layer of each mechanism."""
    lengths = sorted(set(chosen.tokens))
    check_at_least(1, "--", tokens=lengths[0])
    sizes = {"dim": chosen.dim, "num_heads": chosen.heads}
    measured = list(layer_costs(_asked(chosen, names()), lengths, options=chosen.options, **sizes))
    return drawing.draw_cost(measured, title=f"one layer, width {chosen.dim}, {chosen.heads} heads")


def _asked(chosen: Namespace, default: list[str]) -> list[str]:
    """The mechanisms of `--attention`; `ValueError` for unknown ones and for stacks, in `--options` too."""
    asked = chosen.attention.split(",") if chosen.attention else default
    for name in (*asked, *chosen.options):
        if name in STACKS:
            raise ValueError(f"{matrices.NOT_DRAWN}, and {name} is a stack of its own")
        mechanism(name)
    return asked


def _fresh(chosen: Namespace, name: str, *, parts: int, seed: int = matrices.SEED) -> Attention:
    sizes = {"dim": chosen.dim, "num_heads": chosen.heads, "tokens": chosen.tokens}
    return matrices.fresh_layer(name, **sizes, parts=parts, options=chosen.options.get(name, {}), seed=seed)


def _heads(chosen: Namespace, w_HTS: Tensor) -> Sequence[int]:
    """The head that is asked for, or all."""
    return range(len(w_HTS)) if chosen.head is None else [_in_range("head", chosen.head, len(w_HTS))]


def _only_fresh(chosen: Namespace) -> None:
    if chosen.attention or chosen.options:
        raise ValueError("a run has its own mechanisms: --attention and --options are for fresh layers")


def _layers(chosen: Namespace) -> list[Attention]:
    """The mechanisms of a trained model, of a language model or a classifier, from the first layer on."""
    _only_fresh(chosen)
    runs, folder = training.runs, chosen.run
    model: nn.Module
    if runs.is_classifier(folder):
        model = runs.load_classifier(folder, "cpu").model
    else:
        model = runs.load_run(folder, "cpu").decoder
    return [block.attention for block in matrices.blocks(model)]


def _in_range(what: str, number: int, count: int) -> int:
    if not 0 <= number < count:
        raise ValueError(f"{what} {number} is not there: {what}s are 0 to {count - 1}")
    return number


PICTURES: dict[str, tuple[Callable[[], Parser], Callable[[Namespace], drawing.Figure]]] = {
    "weights": (_weights_parser, weights),
    "reach": (_reach_parser, reach),
    "positions": (_positions_parser, positions),
    "cost": (_cost_parser, cost),
}
"""The parser of each picture, and the function that draws it; it raises `ValueError` for what cannot be drawn."""
