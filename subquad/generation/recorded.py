"""A decoding step as one flat list of tensor operations.

A step of a small model is a few hundred short operations, and the modules, checks and states around them take longer
than the operations do. They run once, while the operations are recorded.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from subquad.state import State

Step = Callable[[Tensor, Tensor, State], tuple[Tensor, State]]
aten = torch.ops.aten
COMMON = (
    "add", "addcmul", "baddbmm", "bmm", "cat", "div", "eq", "exp", "flatten", "layer_norm", "logaddexp", "masked_fill",
    "matmul", "mul", "neg", "rms_norm", "roll", "select", "sigmoid", "softmax", "stack", "sub", "transpose",
    "unflatten", "unsqueeze",
)  # fmt: skip
"""Operations that `torch` has under the same name with the same arguments: a call there takes half as long as through
`torch.ops`, a microsecond less."""
COMMON_NN = ("elu", "gelu", "linear", "scaled_dot_product_attention", "silu")
"""As `COMMON`, of `torch._C._nn`, which torch.nn.functional exports."""


def record(step: Step, tokens_B1: Tensor, active_B: Tensor, state: State) -> GraphModule:
    """Return `step(tokens, active, state)` as a function of `tokens`, `active` and the tensors that `split` returns.

    It returns the logits `[B, V]` and the next state's tensors. Its operations are those of `step`, so results have the
    same bits; weights stay the model's own. Shapes must be constant, and all counts `seen` of the state the same: they
    become one, so that cosines, sines and masks are computed once and not in each layer.
    """
    traced = make_fx(flat(step, state), pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = traced(tokens_B1, active_B, *split(state))
    _simplify(graph)
    return graph


def flat(step: Step, like: State) -> Callable[..., list[Tensor]]:
    """Return `step` as a function of `tokens`, `active` and the tensors of a state like `like`, unrecorded."""

    def run(tokens_B1: Tensor, active_B: Tensor, *tensors: Tensor) -> list[Tensor]:
        logits_BV, after = step(tokens_B1, active_B, joined(like, tensors))
        return [logits_BV, *split(after)]

    return run


def split(state: State) -> list[Tensor]:
    """Return the count `seen`, then all other tensors of a state."""
    return [state.tensor("seen"), *_others(state)]


def joined(like: State, tensors: list[Tensor] | tuple[Tensor, ...]) -> State:
    """Return the state with the structure of `like` and these tensors, as `split` returns them."""
    return _filled(like, tensors[0], iter(tensors[1:]))


def _others(state: State) -> Iterator[Tensor]:
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            yield from _others(entry)
        elif isinstance(entry, Tensor) and name != "seen":
            yield entry


def _filled(like: State, seen_B: Tensor, tensors: Iterator[Tensor]) -> State:
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
    """Drop operations that return their input, and repetitions of those that depend on the positions alone."""
    _, _, seen, *_ = graph.graph.nodes
    first: dict[Any, Node] = {}
    positional = {seen}
    direct = {name: getattr(torch, name) for name in COMMON} | {name: getattr(torch._C._nn, name) for name in COMMON_NN}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        same: Node | None = None
        if _returns_its_input(node):
            same = node.all_input_nodes[0]
        elif positional.issuperset(node.all_input_nodes) and not node.target._schema.is_mutable:
            same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            positional.add(same)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
        elif node.target.namespace == "aten":
            node.target = direct.get(node.target._schema.name.removeprefix("aten::"), node.target)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _returns_its_input(node: Node) -> bool:
    if node.target is aten.dropout.default:
        return bool(node.args[1] == 0) or node.args[2] is False
    if node.target not in (aten.to.dtype, aten.to.dtype_layout):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return before.dtype == after.dtype and before.device == after.device
