"""`subquad show`: draw attention weights, receptive fields, position terms and costs, as PNG or SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from torch import nn

from subquad import training
from subquad.attention import Attention, mechanism, names
from subquad.bars import READING, counted, waiting
from subquad.cli.arguments import Parser
from subquad.cli.threads import one_thread
from subquad.config import check_at_least, suggest
from subquad.data.tokenizers import encode_text
from subquad.evaluation import drawing
from subquad.models import DecoderConfig, matrices
from subquad.models.build import build_model
from subquad.models.costs import layer_costs
from subquad.models.stacks import STACKS
from subquad.program import command
from subquad.training.tasks_classify import labelled

OVERVIEW = f"""\
usage: subquad show WHAT [RUN] [options]

Draw a picture, as PNG or SVG, of untrained mechanisms or of a trained RUN.

what:
  weights     the attention weights: how much each token reads of the others
  reach       the receptive field of a token after each layer
  positions   the position terms of the logits, in mechanisms that have them (elita)
  cost        FLOPs and state by length, for all mechanisms

examples:
  {command("show", "weights", "--attention", "llp,window", "--out", "weights.png")}
  {command("show", "weights", "runs/mine", "--layer", 0, "--head", 1, "--text", "def main(argv):", "--out", "head.svg")}

`subquad show WHAT --help` lists the options.
"""
EXAMPLE_HELP = "Number of the held-out sequence that a classifier RUN reads. null: 0, the first."
RUN_HELP = "Folder of a run, to draw its trained layers. null: untrained layers."
COLUMNS = 5
"""Panels per row."""
LAYER_HELP = "Number of the layer of RUN, from 0; looped stacks count the layers of every pass. null: all."


def run(arguments: Sequence[str]) -> int:
    """Parse, draw and write; return the exit status."""
    what = arguments[0] if arguments else ""
    if what in ("-h", "--help"):
        sys.stdout.write(OVERVIEW)
        return 0
    if what not in PICTURES:
        message = f"unknown picture {what!r}; {suggest(what, PICTURES)}" if what else "no picture named"
        sys.stderr.write(f"error: {message}\nsee {command('show', '--help')}\n")
        return 2
    make_parser, draw = PICTURES[what]
    parser = make_parser()
    chosen = parser.parse_args(arguments[1:])
    with parser.checking(), one_thread():  # reads nothing but arguments and a run
        file = drawing.check_file(chosen.out or f"{what}.png")
        drawing.save(draw(chosen), file)
    sys.stdout.write(f"{file}\n")
    return 0


def _parser(what: str, description: str, *, tokens: int) -> Parser:
    """Return the options shared by the pictures of mechanisms."""
    parser = Parser(f"show {what} [RUN]", description)
    parser.prog = command("show", what)
    parser.add_optional("run", RUN_HELP)
    parser.add_optional("--attention", "Mechanisms, such as llp,window. null: all that this picture can show.")
    parser.add_options(
        "Options of untrained mechanisms, such as --options.llp.segment 16. By default windows and segments are a "
        "fraction of --tokens, so that they show."
    )
    parser.add_argument("--tokens", type=int, default=tokens, help="Tokens in the picture, at most.")
    parser.add_argument("--dim", type=int, default=64, help="Model width of untrained layers.")
    parser.add_argument("--heads", type=int, default=2, help="Heads of untrained layers.")
    parser.add_optional("--out", _out_help(what))
    return parser


def _out_help(what: str) -> str:
    return f"File to write, {' or '.join(drawing.SUFFIXES)}. null: {what}.png."


def _weights_parser() -> Parser:
    parser = _parser("weights", "Draw attention weights: row t, column s is how much t reads of s.", tokens=48)
    parser.add_optional("--text", "Text that a language model RUN reads.")
    parser.add_optional("--example", EXAMPLE_HELP, int)
    parser.add_optional("--layer", LAYER_HELP, int)
    parser.add_optional("--head", "Number of the head, from 0. null: all, or their mean of several mechanisms.", int)
    return parser


def _reach_parser() -> Parser:
    description = "Draw receptive fields: the first layer of a stack in which a token can depend on each earlier token."
    parser = _parser("reach", description, tokens=64)
    parser.add_argument("--layers", type=int, default=8, help="Layers of an untrained stack.")
    return parser


def _positions_parser() -> Parser:
    description = "Draw the position terms that are added to the logits, by layer and head."
    parser = _parser("positions", description, tokens=256)
    parser.add_argument("--layers", type=int, default=2, help="Untrained layers to draw.")
    return parser


def _cost_parser() -> Parser:
    parser = Parser("show cost", "Draw the FLOPs and the bytes of state of one layer per mechanism, by length.")
    parser.prog = command("show", "cost")
    parser.add_optional("--attention", "Mechanisms, such as llp,window. null: all.")
    parser.add_options("Options of mechanisms, such as --options.llp.segment 512.")
    lengths = [2**power for power in range(8, 17)]
    parser.add_argument("--tokens", nargs="+", type=int, default=lengths, help="Lengths in tokens.")
    parser.add_argument("--dim", type=int, default=512, help="Model width.")
    parser.add_argument("--heads", type=int, default=8, help="Heads.")
    parser.add_optional("--out", _out_help("cost"))
    return parser


def weights(chosen: Namespace) -> drawing.Figure:
    """Draw the mean over heads of several untrained mechanisms, all heads of a single one, or a trained model's."""
    check_at_least(1, "--", tokens=chosen.tokens)
    if chosen.run is not None:
        return _trained_weights(chosen)
    for name in ("layer", "text", "example"):
        if chosen[name] is not None:
            raise ValueError(f"--{name} is for a trained model: give the folder of a run")
    asked = _asked(chosen, names(), stacks=True)
    found = [(name, matrix) for name in asked for matrix in _untrained(chosen, name)]
    if len(asked) == 1 and len(found) > 1:
        grid = [_heads_of(chosen, matrix, row=f"layer {matrix.layer}: {matrix.name}") for _, matrix in found]
    else:
        panels = []
        for name, matrix in found:
            title = name if matrix.name == name else f"{name}\nlayer {matrix.layer}: {matrix.name}"
            if len(asked) == 1 or chosen.head is not None:
                panels += _heads_of(chosen, matrix, title=f"{title}, ")
            else:
                panels.append(drawing.Panel(matrix.weights_HTS.mean(0).numpy(), title, "", matrix.causal, matrix.keys))
        grid = drawing.in_rows(panels, COLUMNS)
    over = "mean of heads" if len(asked) > 1 and chosen.head is None else f"{asked[0]}, width {chosen.dim}"
    return drawing.draw_weights(grid, title=f"Attention weights of untrained layers ({over})")


def _untrained(chosen: Namespace, name: str) -> list[matrices.WeightMatrix]:
    """Return the weights of an untrained mechanism, or of a stack of two layers."""
    if name not in STACKS:
        layer = _fresh(chosen, name, parts=4)
        return [matrices.WeightMatrix(0, name, matrices.fresh_weights(layer, chosen.tokens), layer.causal)]
    given, half, part = chosen.options.get(name, {}), max(1, chosen.tokens // 2), max(1, chosen.tokens // 8)
    compressed = {"history_tokens": half, "projected": part}
    short = {"segments": {"segment": part}, "compressed": compressed}.get(given.get("history"), {})
    shape = {"dim": chosen.dim, "num_heads": chosen.heads, "num_layers": 2, "init_std": chosen.dim**-0.5}
    shape |= {"attention": name, "vocab_size": chosen.tokens, "options": {name: {"latents": half, **short, **given}}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(matrices.SEED)
        return build_model(DecoderConfig(**shape)).eval().weights(range(chosen.tokens))


def _heads_of(chosen: Namespace, m: matrices.WeightMatrix, title: str = "", row: str = "") -> list[drawing.Panel]:
    """Return a panel for each head that is asked for."""
    w_HTS = m.weights_HTS.numpy()
    heads = range(len(w_HTS)) if chosen.head is None else [_in_range("head", chosen.head, len(w_HTS))]
    return [drawing.Panel(w_HTS[h], f"{title}head {h}", row, m.causal, m.keys) for h in heads]


def _trained_weights(chosen: Namespace) -> drawing.Figure:
    _only_fresh(chosen)
    read = _reading_example if training.runs.is_classifier(chosen.run) else _reading_text
    found, shown_T = read(chosen)
    if chosen.layer is not None:
        layer = _in_range("layer", chosen.layer, found[-1].layer + 1)
        found = [matrix for matrix in found if matrix.layer == layer]
    grid = [_heads_of(chosen, matrix, row=f"layer {matrix.layer}: {matrix.name}") for matrix in found]
    return drawing.draw_weights(grid, title=f"Attention weights of {Path(chosen.run).name}", tokens=shown_T)


def _reading_text(chosen: Namespace) -> tuple[list[matrices.WeightMatrix], list[str]]:
    """Return the weights of a language model that reads `--text`, and each token as text."""
    if chosen.example is not None:
        raise ValueError("--example is for a classifier; give a text for the language model to read by --text")
    if chosen.text is None:
        raise ValueError("give a text for the language model to read by --text")
    with waiting(READING):
        loaded = training.runs.load_run(chosen.run, "cpu")
    tokens_T = encode_text(loaded.tokenizer, chosen.text)[: chosen.tokens]
    if not tokens_T:
        raise ValueError(f"--text must have at least one token, got {chosen.text!r}")
    return loaded.decoder.weights(tokens_T), [loaded.tokenizer.decode([token]) for token in tokens_T]


def _reading_example(chosen: Namespace) -> tuple[list[matrices.WeightMatrix], list[str]]:
    """Return the weights of a classifier that reads a held-out sequence of its task, and the labels of its rows."""
    if chosen.text is not None:
        raise ValueError("--text is for a language model; choose a sequence of the classifier's task by --example")
    with waiting(READING):
        loaded = training.runs.load_classifier(chosen.run, "cpu")
    if loaded.config is None:
        raise ValueError(f"{loaded.folder} has no config.yaml that names the sequences of its task")
    items: Any = labelled(loaded.config).held_out
    item = items[_in_range("example", chosen.example or 0, len(items))]
    tokens_T = item["input_ids"][item["attention_mask"] > 0].tolist()[: chosen.tokens]
    first = ["class"] if loaded.config.classify.pooling == "class" else []
    return matrices.trained_weights(loaded.model, tokens_T), [*first, *map(str, tokens_T)]


def reach(chosen: Namespace) -> drawing.Figure:
    """Draw untrained stacks of one mechanism each, or the layers of a trained model."""
    check_at_least(1, "--", tokens=chosen.tokens)
    if chosen.run is not None:
        layers = _layers(chosen)
        return drawing.draw_reach([_reach(Path(chosen.run).name, layers, chosen.tokens)], layers=len(layers))
    check_at_least(1, "--", layers=chosen.layers)
    stacks = [
        _reach(name, [_fresh(chosen, name, parts=8)] * chosen.layers, chosen.tokens)
        for name in counted("mechanism", _asked(chosen, names()))
    ]
    if not chosen.attention:  # skip stacks whose first layer connects all tokens: their panels are all alike
        stacks = [stack for stack in stacks if stack.matrix[-1].max() > 1 or not stack.matrix[-1].all()] or stacks[:1]
    return drawing.draw_reach(stacks, layers=chosen.layers)


def _reach(title: str, layers: Sequence[Attention], tokens: int) -> drawing.Panel:
    allowed = {layer: matrices.allowed(layer, tokens) for layer in layers}
    reached = list(matrices.reach(allowed[layer] for layer in layers))
    causal = all(layer.causal for layer in layers)
    return drawing.Panel(matrices.first_layer(reached).numpy(), title, causal=causal)


def positions(chosen: Namespace) -> drawing.Figure:
    """Draw a row per layer (of a trained model, layers with position terms) and a column per head."""
    check_at_least(1, "--", tokens=chosen.tokens, layers=chosen.layers)
    if chosen.run is not None:
        numbered = list(enumerate(_layers(chosen)))
        numbered = [entry for entry in numbered if entry[1].has_position_terms] or numbered
    else:
        having = [name for name in names() if mechanism(name).has_position_terms]
        asked = [(name, seed) for name in _asked(chosen, having) for seed in range(chosen.layers)]
        numbered = [(seed, _fresh(chosen, name, parts=4, seed=seed)) for name, seed in asked]
    grid = []
    for i, layer in numbered:
        terms_HTS = matrices.position_terms(layer, chosen.tokens).numpy()
        grid.append([drawing.Panel(t_TS, f"head {h}", f"layer {i}", True) for h, t_TS in enumerate(terms_HTS)])
    return drawing.draw_positions(grid, title="Position terms of attention")


def cost(chosen: Namespace) -> drawing.Figure:
    """Draw the costs of one layer of each mechanism."""
    lengths = sorted(set(chosen.tokens))
    check_at_least(1, "--", tokens=lengths[0])
    sizes = {"dim": chosen.dim, "num_heads": chosen.heads}
    asked = counted("mechanism", _asked(chosen, names()))
    measured = list(layer_costs(asked, lengths, options=chosen.options, **sizes))
    return drawing.draw_cost(measured, title=f"Cost of one layer of width {chosen.dim} with {chosen.heads} heads")


def _asked(chosen: Namespace, default: list[str], *, stacks: bool = False) -> list[str]:
    """Return the names of `--attention`; `ValueError` for unknown ones and, also in `--options`, for stacks.

    With `stacks` only those without a causal form are refused.
    """
    asked = chosen.attention.split(",") if chosen.attention else default
    for name in (*asked, *chosen.options):
        if name not in STACKS:
            mechanism(name)
        elif not stacks or "causal" not in STACKS[name].forms:
            raise ValueError(f"{matrices.NOT_DRAWN}, and {name} is a stack of its own")
    return asked


def _fresh(chosen: Namespace, name: str, *, parts: int, seed: int = matrices.SEED) -> Attention:
    sizes = {"dim": chosen.dim, "num_heads": chosen.heads, "tokens": chosen.tokens}
    return matrices.fresh_layer(name, **sizes, parts=parts, options=chosen.options.get(name, {}), seed=seed)


def _only_fresh(chosen: Namespace) -> None:
    if chosen.attention or chosen.options:
        raise ValueError("a run has its own mechanisms: --attention and --options are for untrained layers")


def _layers(chosen: Namespace) -> list[Attention]:
    """Return the mechanisms of a trained language model or classifier, layer by layer."""
    _only_fresh(chosen)
    runs, folder = training.runs, chosen.run
    model: nn.Module
    with waiting(READING):
        if runs.is_classifier(folder):
            model = runs.load_classifier(folder, "cpu").model
        else:
            model = runs.load_run(folder, "cpu").decoder
    return [block.attention for block in matrices.blocks(model)]


def _in_range(what: str, number: int, count: int) -> int:
    if not 0 <= number < count:
        raise ValueError(f"there is no {what} {number}: {what}s are 0 to {count - 1}")
    return number


PICTURES: dict[str, tuple[Callable[[], Parser], Callable[[Namespace], drawing.Figure]]] = {
    "weights": (_weights_parser, weights),
    "reach": (_reach_parser, reach),
    "positions": (_positions_parser, positions),
    "cost": (_cost_parser, cost),
}
"""The parser of each picture and the function that draws it, which raises `ValueError` for what it can't draw."""
