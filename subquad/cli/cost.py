"""`subquad cost`: what mechanisms and models cost at several lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.text import Text

from subquad.attention import names
from subquad.cli.arguments import Parser
from subquad.cli.tables import console, count, print_table, size, write_csv, write_json
from subquad.config import check_at_least
from subquad.models import DecoderConfig, costs
from subquad.models.costs import Measured, Volume
from subquad.models.stacks import STACKS
from subquad.recipes import recipe_path
from subquad.training.config import TrainConfig

CLASSES = 2
"""Of a classifier's head; more cost next to nothing."""
LENGTHS = (1024, 4096, 16384)
DIM, HEADS, LAYERS = 512, 8, 4
HEADERS = ("", "tokens", "scores", "allowed", "forward", "backward", "parameters", "activations", "state")
LEGEND = (
    "Scores are weights of all heads, computed (masked ones included) and allowed; a scan computes none. FLOPs count a "
    "multiply-add as two, with the projections. Activations are what autograd keeps of one sequence in float32; the "
    "state is what decoding keeps after it, in float32."
)
SENT_HEADERS = ("", "tokens", "sent forward", "sent backward")
SENT_LEGEND = (
    "Bytes that the process which sends most sends for one sequence in float32, forward and backward; "
    "`not shared` is what several processes cannot share."
)


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "cost [RUN]",
        "Count what one sequence costs, without computing it: score entries, FLOPs forward and backward, parameters, "
        "activations in training, state in decoding. Of a layer of each mechanism and of the stacks, or of one model.",
    )
    model = parser.add_argument_group("a whole model instead of layers")
    model.add_argument("run", nargs="?", type=str | None, default=None, help="The folder of a run: its model.")
    model.add_argument("--config", type=str | None, default=None, help="A training configuration: its model.")
    model.add_argument("--recipe", type=str | None, default=None, help="A shipped recipe: its model.")
    parser.add_optional("--attention", "Mechanisms and stacks, as a,b,c; or all.")
    parser.add_options("Options of mechanisms and stacks: --options.llp.segment 512.")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=None, help=f"Lengths (default: {' '.join(map(str, LENGTHS))})."
    )
    parser.add_optional("--dim", f"Model width (default: {DIM}).", int)
    parser.add_optional("--heads", f"Attention heads (default: {HEADS}).", int)
    parser.add_optional("--layers", f"Layers of a stack (default: {LAYERS}).", int)
    parser.add_optional(
        "--context", "Also what each of so many processes sends where they share the sequence (docs/scale.md).", int
    )
    parser.add_optional("--json", "Also write the whole numbers to this file.")
    parser.add_optional("--csv", "Also write them to this file as a table.")
    parser.add_argument("--markdown", action="store_true", help="Print the tables alone, in Markdown.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, count, print, return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():  # nothing is read but arguments and configurations
        _check(chosen)
        records = _costs(chosen)
    if chosen.json:
        write_json(chosen.json, records)
    if chosen.csv:
        write_csv(chosen.csv, records["rows"])
    return 0


def _check(chosen: Namespace) -> None:
    """Raise `ValueError` for arguments that do not go together."""
    models = [f for f, v in (("RUN", chosen.run), ("--config", chosen.config), ("--recipe", chosen.recipe)) if v]
    if len(models) > 1:
        raise ValueError(f"{' and '.join(models)} each name a model; give one")
    for name in ("layers", "heads", "dim", "attention", "options"):
        if models and chosen[name] not in (None, {}):
            raise ValueError(f"--{name} does not go with {models[0]}; what does: --context, --tokens")
    for tokens in chosen.tokens or ():
        check_at_least(1, tokens=tokens)
    if chosen.context is not None and chosen.context < 1:
        raise ValueError(f"--context must be at least 1 process, got {chosen.context}")
    for tokens in chosen.tokens or LENGTHS:
        if chosen.context is not None and tokens % chosen.context:
            raise ValueError(f"--tokens must be multiples of --context {chosen.context} (equal parts), got {tokens}")


def _model_config(run: str | None, config: str | None, recipe: str | None) -> DecoderConfig | None:
    """The model of a run's folder, of a configuration file or of a recipe; None where none is named."""
    if run is not None:
        if not Path(run).is_dir():
            hint = f"; mechanism? use --attention {run}" if run in {*names(), *STACKS} else ""
            raise FileNotFoundError(
                f"there is no folder {run}; give the folder of a run, as `subquad train` makes it{hint}"
            )
        file = Path(run) / "config.yaml"
        if not file.is_file():
            raise FileNotFoundError(f"{run} holds no config.yaml, so it is no run of `subquad train`")
    elif config is not None:
        file = Path(config)
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {config}")
    elif recipe is not None:
        file = recipe_path(recipe)
    else:
        return None
    training = TrainConfig.from_file(file)
    return training.model if training.reads_text else training.encoder(CLASSES)


def _costs(chosen: Namespace) -> dict[str, Any]:
    """Print the table of layers and stacks, or of one model; its rows are returned."""
    lengths, context = chosen.tokens or list(LENGTHS), dict[str, Any]()
    config = _model_config(chosen.run, chosen.config, chosen.recipe)
    if config is not None:
        table = list(costs.model_costs(config, lengths))
        _print(
            table,
            f"{', '.join(config.mechanisms)}: {config.num_layers} layers, width {config.dim}, with the head",
            chosen.markdown,
        )
        if chosen.context is not None:
            context = _volumes(costs.model_volumes(config, lengths, chosen.context), chosen)
        return {"model": config.to_dict(), "rows": [entry.record() for entry in table], **context}
    asked = chosen.attention.split(",") if chosen.attention else None
    layers, stacks = costs.chosen(asked, chosen.options)
    sizes = {"dim": _or(chosen.dim, DIM), "num_heads": _or(chosen.heads, HEADS)}
    depth = _or(chosen.layers, LAYERS)
    table = list(costs.layer_costs(layers, lengths, options=chosen.options, **sizes))
    whole = list(costs.stack_costs(stacks, lengths, options=chosen.options, num_layers=depth, **sizes))
    width = f"width {sizes['dim']}, {sizes['num_heads']} heads"
    if table:
        _print(table, f"One layer: {width}", chosen.markdown)
        if chosen.context is not None:
            volumes = costs.layer_volumes(layers, lengths, chosen.context, options=chosen.options, **sizes)
            context = _volumes(volumes, chosen)
    if whole:
        _print(whole, f"Whole models: {depth} layers, {width}, with feed-forward and head", chosen.markdown)
    return {**sizes, "layers": depth, "rows": [entry.record() for entry in table + whole], **context}


def _volumes(volumes: Iterable[Volume], chosen: Namespace) -> dict[str, Any]:
    """Print what the processes send; the records are returned."""
    rows = list(volumes)
    lines = []
    for row in rows:
        sent = ("not shared",) * 2 if row.sent is None else tuple(size(number) for number in row.sent)
        lines.append((row.name, f"{row.tokens:,}", *sent))
    shown = [(line[0] if i == 0 or line[0] != lines[i - 1][0] else "", *line[1:]) for i, line in enumerate(lines)]
    print_table(f"Shared by {chosen.context} processes", SENT_HEADERS, shown, markdown=chosen.markdown)
    if not chosen.markdown:
        console().print(Text(SENT_LEGEND))
    return {"context": [row.record() for row in rows]}


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _print(measured: Sequence[Measured], title: str, markdown: bool) -> None:
    """A table with a line for each length; lengths of one mechanism stand together."""
    lines, before = list[tuple[str, ...]](), None
    for name, kind, cost in measured:
        label = f"{name} (bidirectional)" if kind == "bidirectional" else name
        lines.append(
            (
                label if name != before else "",
                f"{cost.tokens:,}",
                count(cost.score_entries),
                count(cost.unmasked_entries),
                count(cost.mixing_flops + cost.projection_flops),
                count(cost.backward_flops),
                count(cost.parameters),
                size(cost.activation_bytes),
                size(cost.state_bytes) if cost.state_bytes else "none",
            )
        )
        before = name
    print_table(title, HEADERS, lines, markdown=markdown)
    if not markdown:
        console().print(Text(LEGEND))
        shown = {name.partition(" ")[0] for name, _, _ in measured}
        for stack in STACKS.values():
            if stack.name in shown and stack.cost_note:
                console().print(Text(stack.cost_note))
