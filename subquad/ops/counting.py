"""Count the cost of a run on meta tensors, which have shapes but no data: the time does not depend on the length.

Torch's FlopCounterMode counts operations with the formulas of `subquad.ops.flops`; operators report the scores that
they compute. The count is always for a CPU in float32 on the backend `torch`, whatever the module's mode, dtype and
device and the context of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from subquad.ops import flops
from subquad.ops._torch.tiles import score_entries, unmasked_entries
from subquad.ops.backends import use_backend
from subquad.ops.patterns import Pattern
from subquad.state import State

MakeInput = Callable[[], Tensor]
Run = Callable[[Tensor], tuple[Tensor, State | None]]


@dataclass(frozen=True)
class Cost:
    """Cost of one layer or model for one sequence."""

    tokens: int
    score_entries: int
    """Computed weights of all heads, masked ones included."""
    unmasked_entries: int
    """Computed weights that the definition does not fix at zero."""
    mixing_flops: int
    """Floating-point operations of the mixing, forward, without projections (a multiply-add counts two)."""
    projection_flops: int
    """Floating-point operations of the linear projections, forward."""
    backward_flops: int
    """Floating-point operations of the mixing and the projections, backward."""
    parameters: int
    activation_bytes: int
    """Bytes that autograd keeps from forward to backward in training on a CPU in float32, without parameters."""
    state_bytes: int
    """Bytes kept for the next token after `tokens` tokens, in float32; 0 if there is no next token."""


class Scores(NamedTuple):
    """Scores that one call computes: `heads` times those of `pattern`, or of all pairs if it is None."""

    heads: int
    pattern: Pattern | None
    q_start: int
    queries: int
    k_start: int
    keys: int
    replaced: int
    """Leading queries whose outputs another call replaces: their scores are computed, but do not count as allowed."""

    def computed(self) -> int:
        """Return the entries of all tiles."""
        if self.pattern is None:
            return self.heads * self.queries * self.keys
        return self.heads * score_entries(self.pattern, self.queries, self.keys, self.q_start, self.k_start)

    def allowed(self) -> int:
        """Return the entries that the definition does not fix at zero."""
        if self.pattern is None:
            return self.heads * self.queries * self.keys
        where = self.keys, self.q_start, self.k_start
        replaced = min(self.replaced, self.queries)
        every = unmasked_entries(self.pattern, self.queries, *where)
        return self.heads * (every - (unmasked_entries(self.pattern, replaced, *where) if replaced else 0))


class _Recording(threading.local):
    """Calls of the run being counted (None: no run), and the leading queries now being replaced, by thread."""

    def __init__(self) -> None:
        # Set in each thread from the start: torch.compile guards whether an attribute is there.
        self.calls: list[Scores] | None = None
        self.replaced = 0


_recording = _Recording()


def report_scores(
    heads: int, queries: int, keys: int, pattern: Pattern | None = None, q_start: Any = 0, k_start: Any = 0
) -> None:
    """Add these scores, which an operator computes, to the run being counted, if any."""
    if _recording.calls is not None:
        _recording.calls.append(Scores(heads, pattern, q_start, queries, k_start, keys, _recording.replaced))


@contextmanager
def first_replaced(queries: int) -> Iterator[None]:
    """Mark the first `queries` outputs computed within the block as replaced by another computation."""
    before, _recording.replaced = _recording.replaced, queries
    try:
        yield
    finally:
        _recording.replaced = before


def cost_of(
    module: nn.Module, tokens: int, run: Run, make_input: MakeInput, *, keep: Callable[[Tensor], Any] | None = None
) -> Cost:
    """Return the cost of `run(make_input())`, a call of `module` or its methods on `tokens` tokens.

    `run` returns outputs and state. Operations, scores and state are counted in evaluation mode, without dropout and
    recomputation; activations are counted in training mode, from `keep` (default: `run`). Raises `ValueError` for a
    negative number of tokens.
    """
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton

    flops.register()
    before = _recording.calls
    calls = _recording.calls = []
    try:
        with without_data(module, training=False) as call, FlopCounterMode(display=False) as counter:
            with _Linear(counter) as linear:
                out, state = call(run, make_input())
            forward = counter.get_total_flops()
            if out.requires_grad:
                out.sum().backward()
            backward = counter.get_total_flops() - forward
    finally:
        _recording.calls = before
    return Cost(
        tokens=tokens,
        score_entries=sum(scores.computed() for scores in calls),
        unmasked_entries=sum(scores.allowed() for scores in calls),
        mixing_flops=forward - linear.flops,
        projection_flops=linear.flops,
        backward_flops=backward,
        parameters=sum(p.numel() for p in module.parameters()),
        activation_bytes=activation_bytes(module, run if keep is None else keep, make_input),
        state_bytes=0 if state is None else state.nbytes,
    )


def state_bytes(module: nn.Module, run: Run, make_input: MakeInput) -> int:
    """Return the bytes of the state that `run(make_input())` leaves, in float32."""
    with without_data(module, training=False) as call, torch.no_grad():
        state = call(run, make_input())[1]
        return 0 if state is None else int(state.nbytes)


def activation_bytes(module: nn.Module, run: Callable[[Tensor], Any], make_input: MakeInput) -> int:
    """Return the bytes that `run(make_input())` keeps for its backward pass in training, without parameters.

    Every storage counts once and in full, since a view keeps all of it alive. A GPU also keeps the weights of every
    tile of a masked pattern.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # the reference keeps the number from being reused
        return tensor

    with without_data(module, training=True) as call:
        x = make_input()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = call(run, x)
        total = sum(storage.nbytes() for number, storage in kept.items() if number not in call.parameters)
        del result
    return total


def one_sequence(tokens: int) -> Tensor:
    """Return `[1, tokens]` zeros as token ids."""
    return torch.zeros(1, tokens, dtype=torch.int64)


class _Linear(TorchFunctionMode):
    """Count the operations of linear layers apart."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.counter, self.flops = counter, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        before = self.counter.get_total_flops()
        out = func(*args, **(kwargs or {}))
        self.flops += self.counter.get_total_flops() - before
        return out


class _Inside(nn.Module):
    """Module that calls a function which uses `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[Tensor], Any], x: Tensor) -> Any:
        return run(x)


class Caller:
    """Call functions that use `module`, with tensors without data in place of its parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self.inside = _Inside(module)
        self.own = {name: _shape_of(p).requires_grad_() for name, p in self.inside.named_parameters()}
        self.own |= {name: _shape_of(b) for name, b in self.inside.named_buffers()}
        self.parameters = {tensor.untyped_storage()._cdata for tensor in self.own.values()}

    def __call__(self, run: Callable[[Tensor], Any], x: Tensor) -> Any:
        return functional_call(self.inside, self.own, (run, x))


@contextmanager
def without_data(module: nn.Module, *, training: bool) -> Iterator[Caller]:
    """Yield a caller on a CPU in float32, whatever is set outside; restore each submodule's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for setting in (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.device("meta"),
            use_backend("torch"),
        ):
            stack.enter_context(setting)
        try:
            module.train(training)
            torch.set_default_dtype(torch.float32)
            yield Caller(module)
        finally:
            torch.set_default_dtype(dtype)
            for part, mode in modes:
                part.training = mode


def _shape_of(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")
