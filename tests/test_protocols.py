"""Every mechanism in PyTorch's protocols: docs/protocols.md says what happens, and each case is a test.

`python -m tests.test_protocols` writes the page.
"""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from subquad.attention import Attention, build, mechanism, names
from subquad.ops.backends import use_backend
from subquad.testing import assert_same_maths
from tests.models.small import OPTIONS
from tests.parallel import divided
from tests.test_state import assert_same

PAGE = Path(__file__).resolve().parents[1] / "docs" / "protocols.md"
TOKENS = 9
LENGTHS = (TOKENS, 17, 70, 33, 5, 2, 130)
NO_STATE = "reads whole sequences and keeps no state"


class ExemptError(Exception):
    """The protocol has nothing to say of a mechanism, for the reason given."""


class RefusedError(Exception):
    """The mechanism refuses the protocol by an error of its own."""


def layer_of(name: str, form: str | None = None) -> Attention:
    torch.manual_seed(0)
    form = form or mechanism(name).forms[0]
    return build(name, dim=8, num_heads=2, causal=form == "causal", **OPTIONS.get(name, {})).double()


def causal_layer(name: str) -> Attention:
    layer = layer_of(name).eval()
    if not layer.causal:
        raise ExemptError(NO_STATE)
    return layer


def in_each_form(check: Callable[[Attention], None]) -> Callable[[str], None]:
    def checked(name: str) -> None:
        for form in mechanism(name).forms:
            check(layer_of(name, form))

    return checked


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 8, dtype=torch.double)


def gradient(layer: Attention, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x)[0].square().sum(), x)[0]


@in_each_form
def forward_mode(layer: Attention) -> None:
    x, t, w = inputs(3, 2, TOKENS)
    leaf = x.clone().requires_grad_()
    (back,) = torch.autograd.grad(layer(leaf)[0], leaf, w)
    tangent = torch.func.jvp(lambda x: layer(x)[0], (x,), (t,))[1].detach()
    assert_same_maths((tangent * w).sum(), (t * back).sum(), "jvp")
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t))[0]).tangent
        assert_same_maths(dual, tangent, "dual_level")


@in_each_form
def gradients_of_samples(layer: Attention) -> None:
    x = inputs(2, TOKENS)
    weights = {key: p.detach() for key, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x_TD: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x_TD[None],))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(weights, x)
    assert_same_maths(found[1], gradient(layer, x), "inputs")
    expected = torch.autograd.grad(
        layer(x[1:])[0].square().sum(), list(layer.parameters()), allow_unused=True, materialize_grads=True
    )
    for key, g in zip(weights, expected, strict=True):
        assert_same_maths(found[0][key][1], g, key)


@in_each_form
def mapped_then_backward(layer: Attention) -> None:
    xs = inputs(2, 1, TOKENS).requires_grad_()
    torch.func.vmap(lambda x: layer(x)[0])(xs).square().sum().backward()
    for x, g in zip(xs.detach(), xs.grad, strict=True):
        assert_same_maths(g, gradient(layer, x), "gradient")


@torch.no_grad()
def mapped_step(name: str) -> None:
    layer = causal_layer(name)
    states = [layer(inputs(2, n), layer(inputs(2, TOKENS))[1])[1] for n in (1, 1)]  # a cache with spare room
    x = inputs(2, 2, 1)
    one_state = torch.func.vmap(lambda x: layer(x, states[0])[0])(x)
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    own_state = torch.func.vmap(lambda x, state: layer(x, state)[0])(x, stacked)
    assert_same_maths(one_state[1], layer(x[1], states[0])[0], "one state")
    for i, state in enumerate(states):
        assert_same_maths(own_state[i], layer(x[i], state)[0], "a state each")


@in_each_form
def second_derivative(layer: Attention) -> None:
    x = inputs(1, 4).requires_grad_()
    with use_backend("reference"):
        assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@torch.no_grad()
def state_is_a_tree(name: str) -> None:
    state = causal_layer(name)(inputs(2, TOKENS))[1]
    leaves, spec = pytree.tree_flatten_with_path(state)
    assert_same(pytree.tree_unflatten([leaf for _, leaf in leaves], spec), state)
    assert next(key.key for (key, *_), _ in leaves) == "seen"
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), state)


@torch.no_grad()
def compiled_loop(name: str) -> None:
    layer, x, graphs = causal_layer(name), inputs(2, 30), CompileCounter()
    step = torch.compile(layer, backend=graphs, fullgraph=True)
    (y, state), (_, expected_state) = step(x[:, :TOKENS]), layer(x[:, :TOKENS])
    for t in range(TOKENS, x.shape[1]):
        y, state = step(x[:, t : t + 1], state)
        expected, expected_state = layer(x[:, t : t + 1], expected_state)
        assert_same_maths(y, expected, f"token {t}")
    assert graphs.frame_count <= 4


def dynamic_training(name: str) -> None:
    layer, graphs = layer_of(name), CompileCounter()
    step = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    for T in LENGTHS:
        x = inputs(2, T).requires_grad_()
        step(x)[0].square().sum().backward()
        assert_same_maths(x.grad, gradient(layer, x.detach()), f"{T} tokens")
    assert graphs.frame_count <= 3


@torch.no_grad()
def exported_step(name: str) -> None:
    layer, x = causal_layer(name), inputs(2, TOKENS + 3)
    _, state = layer(x[:, :TOKENS])
    shapes = torch.export.ShapesCollection()
    for tensor in state.tensors() if layer.state_grows else ():
        shapes[tensor] = {2: torch.export.Dim.DYNAMIC}
    step = torch.export.export(layer, (x[:, :1], state), dynamic_shapes=shapes).module()
    expected_state = state
    for t in range(TOKENS, x.shape[1]):
        y, state = step(x[:, t : t + 1], state)
        expected, expected_state = layer(x[:, t : t + 1], expected_state)
        assert_same_maths(y, expected, f"token {t}")
        assert state.seen == expected_state.seen


@torch.no_grad()
def backend_is_obeyed(name: str) -> None:
    layer, x, graphs = layer_of(name), inputs(1, TOKENS), EagerAndRecordGraphs()
    step = torch.compile(layer, backend=graphs, fullgraph=True)
    step(x)
    with use_backend("reference"):
        y = step(x)[0]
        exported = torch.export.export(layer, (x,)).graph_module
    assert_same_maths(y, layer(x)[0], "outputs")
    *before, after = ("ops.subquad" in graph.code for graph in graphs.graphs)
    assert not after
    assert "ops.subquad" not in exported.code
    if layer.causal:
        assert before == [True], "without the block the operators are there"


def divided_heads(name: str) -> None:
    """Look up what tests/parallel tests on two processes."""
    if name not in divided.RIGHT:
        raise RefusedError


PROTOCOLS = {
    "forward mode: `torch.func.jvp`, `jacfwd`, `dual_level`": forward_mode,
    "`torch.func.grad`, and `vmap` of it for the gradient of each sample": gradients_of_samples,
    "`torch.func.vmap` of a layer, then `backward`": mapped_then_backward,
    "`vmap` of a decoding step, over inputs and over states": mapped_step,
    '`create_graph=True` under `use_backend("reference")`': second_derivative,
    "a state as a pytree with keys, and in `torch.load(weights_only=True)`": state_is_a_tree,
    "an own loop compiled whole: at most four graphs": compiled_loop,
    "training with `dynamic=True`: at most three graphs": dynamic_training,
    "`torch.export` of a step, its state as input and output": exported_step,
    "`use_backend` while tracing: obeyed": backend_is_obeyed,
    "`parallelize_module` by heads (`llp_printed` with `key_norm=False`)": divided_heads,
}


COMPILED = {
    compiled_loop: ("full", "gated_delta_net"),
    dynamic_training: ("elita", "latte"),
    exported_step: ("full", "gated_delta_net", "latte"),
    backend_is_obeyed: ("latte",),
}
"""Protocols that compile, with the mechanisms whose tests are quick."""


def marks(protocol: str, name: str) -> list[pytest.MarkDecorator]:
    return [] if name in COMPILED.get(PROTOCOLS[protocol], names()) else [pytest.mark.slow]


def outcome(protocol: str, name: str) -> str:
    """Return what the page says; an outcome that is neither right nor exempt raises."""
    torch._dynamo.reset()  # compiled functions of other layers count against one limit
    try:
        PROTOCOLS[protocol](name)
    except ExemptError as reason:
        return f"exempt: {reason}"
    except RefusedError:
        return "refused"
    return "right"


def cells() -> dict[tuple[str, str], str]:
    """Return what the page says of each protocol and mechanism: of those that it does not name, *right*."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines[2:]]
    found = {(protocol, name): "right" for protocol, *_ in rows for name in names()}
    for protocol, _, others in rows:
        for listed, what in re.findall(r"(`[^(]*`) \(([^)]*)\)", others):
            found |= {(protocol, name): what for name in re.findall(r"`(\w+)`", listed)}
    return found


def table(found: dict[tuple[str, str], str]) -> str:
    """Return the page's table: a line for each protocol, with the mechanisms for which it is not right."""
    lines = ["| protocol | right for | not for |", "| :--- | :--- | :--- |"]
    for protocol in PROTOCOLS:
        others: dict[str, list[str]] = {}
        for name in names():
            others.setdefault(found[protocol, name], []).append(f"`{name}`")
        right = "all others" if len(others) > 1 else "all"
        others.pop("right", None)
        shown = "; ".join(f"{', '.join(which)} ({what})" for what, which in others.items())
        lines.append(f"| {protocol} | {right} | {shown} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_every_protocol_and_mechanism():
    found = cells()
    assert set(found) == {(protocol, name) for protocol in PROTOCOLS for name in names()}
    assert PAGE.read_text() == INTRODUCTION + table(found)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # operators run row by row inside `vmap`
@pytest.mark.parametrize(
    ("protocol", "name"), [pytest.param(p, n, marks=marks(p, n)) for p in PROTOCOLS for n in names()]
)
def test_a_cell_says_what_happens(protocol, name):
    assert outcome(protocol, name) == cells()[protocol, name]


INTRODUCTION = """# Protocols of PyTorch

What every mechanism does in PyTorch's own protocols, for a layer in its default form (derivatives: in each form).
*Right* means that a test compares it with the plain call, in float64. [Decode in your own loop](decoding.md) shows
how they are used, and [Limits](limits.md) what to take where something is refused. This page is written by
`python -m tests.test_protocols`.

"""


def main() -> None:
    found = {(protocol, name): outcome(protocol, name) for protocol in PROTOCOLS for name in names()}
    PAGE.write_text(INTRODUCTION + table(found))


if __name__ == "__main__":
    sys.exit(main())
