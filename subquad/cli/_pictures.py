"""From the arguments of `subquad show` to figures. Every function raises `ValueError` for what cannot be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace
from torch import Tensor, nn

from subquad.attention import Attention, mechanism, names
from subquad.cli._draw_cost import draw_cost
from subquad.cli._draw_matrices import Reach, Weights, draw_positions, draw_reach, draw_weights
from subquad.data.tokenizers import encode_text
from subquad.evaluation.drawing import Panel, in_rows
from subquad.models import matrices
from subquad.models.stacks import STACKS
from subquad.training.runs import is_classifier, load_classifier, load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 5


def weights(chosen: Namespace) -> Figure:
    """The mean over the heads of every fresh mechanism; all heads of a single one; or those of a trained model."""
    _at_least_one(chosen, "tokens")
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
            panels += [Weights(f"{name}, head {h}", w_HTS[h].numpy(), layer.causal) for h in _heads(chosen, w_HTS)]
        else:
            panels.append(Weights(name, w_HTS.mean(0).numpy(), layer.causal))
    return draw_weights(in_rows(panels, COLUMNS))


def _trained_weights(chosen: Namespace) -> Figure:
    _only_fresh(chosen)
    model, tokens_T, shown_T = _reading_example(chosen) if is_classifier(chosen.run) else _reading_text(chosen)
    layers = matrices.trained_weights(model, tokens_T)
    shown = range(len(layers)) if chosen.layer is None else [_in_range("layer", chosen.layer, len(layers))]
    grid = []
    for i in shown:
        layer, w_HTS = layers[i]
        row = f"layer {i}: {layer.name}"
        grid.append([Weights(f"head {h}", w_HTS[h].numpy(), layer.causal, row) for h in _heads(chosen, w_HTS)])
    return draw_weights(grid, tokens=shown_T)


def _reading_text(chosen: Namespace) -> tuple[nn.Module, list[int], list[str]]:
    """A language model, the tokens of `--text`, and each of them as text."""
    if chosen.example is not None:
        raise ValueError("--example is for a classifier; give the text that the model reads, by --text")
    if chosen.text is None:
        raise ValueError("give the text that the model reads, by --text")
    loaded = load_run(chosen.run, "cpu")
    tokens_T = encode_text(loaded.tokenizer, chosen.text)[: chosen.tokens]
    if not tokens_T:
        raise ValueError(f"--text must hold a token, got {chosen.text!r}")
    return loaded.decoder, tokens_T, [loaded.tokenizer.decode([token]) for token in tokens_T]


def _reading_example(chosen: Namespace) -> tuple[nn.Module, list[int], list[str]]:
    """A classifier, the tokens of a held-out sequence of its task, and what stands in its rows: their numbers."""
    from subquad.training.tasks_classify import labelled

    if chosen.text is not None:
        raise ValueError("--text is for a language model; a classifier reads a sequence of its task, by --example")
    loaded = load_classifier(chosen.run, "cpu")
    if loaded.config is None:
        raise ValueError(f"{loaded.folder} has no config.yaml that names the sequences of its task")
    items: Any = labelled(loaded.config).held_out
    item = items[_in_range("example", chosen.example or 0, len(items))]
    tokens_T = item["input_ids"][item["attention_mask"] > 0].tolist()[: chosen.tokens]
    first = ["class"] if loaded.config.classify.pooling == "class" else []
    return loaded.model, tokens_T, [*first, *map(str, tokens_T)]


def reach(chosen: Namespace) -> Figure:
    """Fresh stacks of one mechanism each, or the layers of a trained model."""
    _at_least_one(chosen, "tokens")
    if chosen.run is not None:
        layers = _layers(chosen)
        return draw_reach([_reach(Path(chosen.run).name, layers, chosen.tokens)], layers=len(layers))
    _at_least_one(chosen, "layers")
    stacks = [
        _reach(name, [_fresh(chosen, name, parts=8)] * chosen.layers, chosen.tokens) for name in _asked(chosen, names())
    ]
    if not chosen.attention:  # what one layer connects at once is the same picture for all
        stacks = [stack for stack in stacks if stack.first[-1].max() > 1 or not stack.first[-1].all()] or stacks[:1]
    return draw_reach(stacks, layers=chosen.layers)


def _reach(title: str, layers: Sequence[Attention], tokens: int) -> Reach:
    allowed = {layer: matrices.allowed(layer, tokens) for layer in layers}
    reached = list(matrices.reach(allowed[layer] for layer in layers))
    return Reach(title, matrices.first_layer(reached).numpy(), all(layer.causal for layer in layers))


def positions(chosen: Namespace) -> Figure:
    """Rows are layers (of a trained model, those that have position terms), columns heads."""
    _at_least_one(chosen, "tokens")
    _at_least_one(chosen, "layers")
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
        grid.append([Panel(t_TS, f"head {h}", f"layer {i}") for h, t_TS in enumerate(terms_HTS)])
    return draw_positions(grid)


def cost(chosen: Namespace) -> Figure:
    """One layer of each mechanism."""
    from subquad.cli._costs import layer_costs

    lengths = sorted(set(chosen.tokens))
    if lengths[0] < 1:
        raise ValueError(f"--tokens must be at least 1, got {lengths[0]}")
    sizes = {"dim": chosen.dim, "num_heads": chosen.heads}
    measured = list(layer_costs(_asked(chosen, names()), lengths, options=chosen.options, **sizes))
    return draw_cost(measured, title=f"one layer, width {chosen.dim}, {chosen.heads} heads")


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
    classifier = is_classifier(chosen.run)
    model = load_classifier(chosen.run, "cpu").model if classifier else load_run(chosen.run, "cpu").decoder
    return [block.attention for block in matrices.blocks(model)]


def _at_least_one(chosen: Namespace, what: str) -> None:
    if chosen[what] < 1:
        raise ValueError(f"--{what} must be at least 1, got {chosen[what]}")


def _in_range(what: str, number: int, count: int) -> int:
    if not 0 <= number < count:
        raise ValueError(f"{what} {number} is not there: {what}s are 0 to {count - 1}")
    return number
