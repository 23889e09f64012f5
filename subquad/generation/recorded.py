"""A decoding step as one flat list of tensor operations.

A step of a small model is a few hundred short operations, and the modules, checks and states around them take longer
than the operations do. They run once, while the operations are recorded.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from subquad.state import State

Forward = Callable[[Tensor, State], tuple[Tensor, State]]
aten = torch.ops.aten


class RecordedStep:
    """`logits, state = forward(tokens, state)` for states of constant shapes, without what is no tensor operation.

    The operations are those of `forward`, so results have the same bits. All counts `seen` of the state must be equal:
    they become one, so that positions, their cosines and masks are computed once and not in each layer. Weights stay
    the model's own. With `compile`, torch.compile makes one function of the list.
    """

    def __init__(self, forward: Forward, tokens_B1: Tensor, state: State, *, compile: bool = False) -> None:
        self._like = state

        def flat(tokens_B1: Tensor, seen_B: Tensor, *tensors: Tensor) -> list[Tensor]:
            logits_BV, after = forward(tokens_B1, self._state(seen_B, tensors))
            return [logits_BV, *_split(after)]

        graph = make_fx(flat, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)(tokens_B1, *_split(state))
        _simplify(graph)
        self._run = torch.compile(graph, dynamic=False, fullgraph=True) if compile else graph

    def __call__(self, tokens_B1: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return logits and the next state, both states as lists that `split` and `joined` convert."""
        logits_BV, *after = self._run(tokens_B1, *state)
        return logits_BV, after

    def split(self, state: State) -> list[Tensor]:
        """Return the count `seen` and then the other tensors of a state."""
        return _split(state)

    def joined(self, tensors: list[Tensor]) -> State:
        """Return the state whose tensors these are."""
        return self._state(tensors[0], tensors[1:])

    def _state(self, seen_B: Tensor, tensors: Iterable[Tensor]) -> State:
        return _filled(self._like, seen_B, iter(tensors))


def _split(state: State) -> list[Tensor]:
    seen = state.seen
    assert isinstance(seen, Tensor)
    return [seen, *_others(state)]


def _others(state: State) -> list[Tensor]:
    found: list[Tensor] = []
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            found += _others(entry)
        elif isinstance(entry, Tensor) and name != "seen":
            found.append(entry)
    return found


def _filled(like: State, seen_B: Tensor, tensors: Any) -> State:
    entries: dict[str, Tensor | int | State] = {}
    for name, entry in like.entries.items():
        if isinstance(entry, State):
            entries[name] = _filled(entry, seen_B, tensors)
        elif isinstance(entry, Tensor):
            entries[name] = seen_B if name == "seen" else next(tensors)
        else:
            entries[name] = entry
    return State(entries, like.config_hash)


def _simplify(graph: GraphModule) -> None:
    """Drop operations that return their input, and the repetitions of those that depend on positions alone."""
    positional: dict[Any, Node] = {}
    known: set[Node] = set()
    for node in list(graph.graph.nodes):
        if node.op == "placeholder" and len(known) == 0 and node.name.startswith("seen"):
            known.add(node)
        if node.op != "call_function":
            continue
        if _returns_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if all(x in known for x in node.all_input_nodes) and not node.target._schema.is_mutable:
            known.add(node)
            key = (node.target, repr(node.args), repr(node.kwargs))
            if key in positional:
                node.replace_all_uses_with(positional[key])
                graph.graph.erase_node(node)
            else:
                positional[key] = node
    graph.recompile()


def _returns_input(node: Node) -> bool:
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if node.target is aten.to.dtype:
        return node.args[0].meta["val"].dtype == node.args[1]
    return False
