"""`subquad cost`: count score entries, FLOPs and memory of mechanisms and models at several lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.text import Text

from subquad.attention import names
from subquad.bars import counted
from subquad.cli.arguments import Parser
from subquad.cli.rich_table import console
from subquad.cli.tables import count, print_table, size, write_csv
from subquad.cli.threads import one_thread
from subquad.config import check_at_least
from subquad.data.files import write_json
from subquad.models import DecoderConfig, costs
from subquad.models.costs import Measured, Volume
from subquad.models.stacks import STACKS
from subquad.recipes import recipe_path
from subquad.training.config import TrainConfig

CLASSES = 2
"""Classes of a classifier's head, whose cost is negligible."""
LENGTHS = (1024, 4096, 16384)
DIM, HEADS, LAYERS = 512, 8, 4
HEADERS = ("", "tokens", "scores", "allowed", "forward", "backward", "parameters", "activations", "state")
SPARE = ("allowed", "parameters", "backward", "scores")
LEGEND = (
    "Scores are attention weights over all heads: computed (including masked ones) and allowed; a scan computes none. "
    "FLOPs include the projections and count a multiply-add as two. Activations are what autograd keeps of one "
    "sequence, the state what decoding keeps after it, both in float32."
)
SENT_HEADERS = ("", "tokens", "sent forward", "sent backward")
SENT_LEGEND = (
    "Bytes sent by the process that sends most, for one sequence in float32, forward and backward; `not shared`: "
    "processes can't share a sequence."
)


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "cost [RUN]",
        "Count the cost of one sequence without running the model: score entries, FLOPs forward and backward, "
        "parameters, activations in training, state in decoding. Of one layer per mechanism and of whole stacks, or of "
        "one model.",
    )
    model = parser.add_argument_group("one model instead of all layers (give at most one)")
    model.add_argument("run", nargs="?", type=str | None, default=None, help="Folder of a run.")
    model.add_argument("--config", type=str | None, default=None, help="File of a training configuration.")
    model.add_argument("--recipe", type=str | None, default=None, help="Name of a recipe.")
    parser.add_optional("--attention", "Mechanisms and stacks, such as llp,window. null or all: every one.")
    parser.add_options("Options of mechanisms and stacks, such as --options.llp.segment 512.")
    default = " ".join(map(str, LENGTHS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=None, help=f"Lengths of the sequence in tokens. null: {default}."
    )
    parser.add_optional("--dim", f"Model width. null: {DIM}.", int)
    parser.add_optional("--heads", f"Attention heads. null: {HEADS}.", int)
    parser.add_optional("--layers", f"Layers of a stack. null: {LAYERS}.", int)
    parser.add_optional(
        "--context", "Also count the bytes sent if this many processes share the sequence (docs/scale.md).", int
    )
    parser.add_optional("--json", "Also write exact numbers to this JSON file.")
    parser.add_optional("--csv", "Also write exact numbers to this CSV file.")
    parser.add_argument("--markdown", action="store_true", help="Print only the tables, in Markdown.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, count and print; return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking(), one_thread():  # reads nothing but arguments and configurations
        _check(chosen)
        records = _costs(chosen)
    if chosen.json:
        write_json(chosen.json, records)
    if chosen.csv:
        write_csv(chosen.csv, records["rows"])
    return 0


def _check(chosen: Namespace) -> None:
    """Raise `ValueError` for arguments that can't be combined."""
    models = [f for f, v in (("RUN", chosen.run), ("--config", chosen.config), ("--recipe", chosen.recipe)) if v]
    if len(models) > 1:
        raise ValueError(f"{' and '.join(models)} each name a model; give one")
    for name in ("layers", "heads", "dim", "attention", "options"):
        if models and chosen[name] not in (None, {}):
            raise ValueError(f"--{name} can't be combined with {models[0]}, only --tokens and --context can")
    for tokens in chosen.tokens or ():
        check_at_least(1, tokens=tokens)
    if chosen.context is not None and chosen.context < 1:
        raise ValueError(f"--context must be at least 1 process, got {chosen.context}")
    for tokens in chosen.tokens or LENGTHS:
        if chosen.context is not None and tokens % chosen.context:
            raise ValueError(f"--tokens must be multiples of --context {chosen.context} (equal parts), got {tokens}")


def _model_config(run: str | None, config: str | None, recipe: str | None) -> DecoderConfig | None:
    """Return the model of a run, configuration file or recipe; None if none is named."""
    if run is not None:
        if not Path(run).is_dir():
            hint = f"; for the mechanism use --attention {run}" if run in {*names(), *STACKS} else ""
            raise FileNotFoundError(f"there is no folder {run}; give the folder of a run of `subquad train`{hint}")
        file = Path(run) / "config.yaml"
        if not file.is_file():
            raise FileNotFoundError(f"{run} has no config.yaml, so it is not a run of `subquad train`")
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
    """Print the table of layers and stacks, or of one model; return its rows."""
    lengths, context = chosen.tokens or list(LENGTHS), dict[str, Any]()
    config = _model_config(chosen.run, chosen.config, chosen.recipe)
    if config is not None:
        # Before anything is printed, since a model that can't share a sequence is refused.
        sent = []
        if chosen.context is not None:
            sent = list(costs.model_volumes(config, counted("length", lengths), chosen.context))
        table = list(costs.model_costs(config, counted("length", lengths)))
        _print(
            table,
            f"{', '.join(config.mechanisms)}: {config.num_layers} layers, width {config.dim}, with the head",
            chosen.markdown,
        )
        if sent:
            context = _volumes(sent, chosen)
        return {"model": config.to_dict(), "rows": [entry.record() for entry in table], **context}
    asked = chosen.attention.split(",") if chosen.attention else None
    layers, stacks = costs.chosen(asked, chosen.options)
    sizes = {"dim": _or(chosen.dim, DIM), "num_heads": _or(chosen.heads, HEADS)}
    depth = _or(chosen.layers, LAYERS)
    table = list(costs.layer_costs(counted("mechanism", layers), lengths, options=chosen.options, **sizes))
    each = counted("stack", stacks)
    whole = list(costs.stack_costs(each, lengths, options=chosen.options, num_layers=depth, **sizes))
    width = f"width {sizes['dim']}, {sizes['num_heads']} heads"
    if table:
        _print(table, f"One layer: {width}", chosen.markdown)
        if chosen.context is not None:
            sharing = counted("mechanism", layers)
            volumes = costs.layer_volumes(sharing, lengths, chosen.context, options=chosen.options, **sizes)
            context = _volumes(volumes, chosen)
    if whole:
        _print(whole, f"Whole models: {depth} layers, {width}, with feed-forward and head", chosen.markdown)
    return {**sizes, "layers": depth, "rows": [entry.record() for entry in table + whole], **context}


def _volumes(volumes: Iterable[Volume], chosen: Namespace) -> dict[str, Any]:
    """Print the bytes sent by processes; return the rows."""
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
    """Print a line per mechanism and length, grouped by mechanism."""
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
    print_table(title, HEADERS, lines, markdown=markdown, spare=SPARE, elsewhere=" or by --markdown or --csv")
    if not markdown:
        console().print(Text(LEGEND))
        shown = {name.partition(" ")[0] for name, _, _ in measured}
        for stack in STACKS.values():
            if stack.name in shown and stack.cost_note:
                console().print(Text(stack.cost_note))
