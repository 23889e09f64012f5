"""A recorded decoding step that is repeated in memory of its own.

A step of a small model is a few hundred short operations, and the modules, checks and states around them take longer
than the operations do. Here each result has its memory: views are made once, and all other operations are calls that
write into the same memory at each step.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.generation.recorded import Call, Recorded, Slot, memory_of

aten = torch.ops.aten
WRITING = {
    getattr(aten, name): getattr(torch, name)
    for name in (
        "_softmax", "abs", "add", "addcmul", "addmm", "all", "any", "argmax", "baddbmm", "bitwise_and", "bitwise_not",
        "bitwise_or", "bmm", "cat", "clamp", "cos", "cumsum", "div", "eq", "exp", "ge", "gt", "index_select", "le",
        "log", "log1p", "logaddexp", "logical_not", "logsumexp", "lt", "maximum", "mean", "minimum", "mm", "mul", "ne",
        "neg", "pow", "reciprocal", "remainder", "rsqrt", "sigmoid", "sin", "sqrt", "square", "stack", "sub", "sum",
        "tanh", "where",
    )
} | {getattr(aten, name): getattr(torch._C._nn, name) for name in ("elu", "gelu", "silu", "softplus")}  # fmt: skip
"""Functions that take the arguments of an operation and write its result to `out`."""
IN_PLACE = {getattr(aten, name): getattr(Tensor, name) for name in ("add_", "addcmul_", "mul_", "scatter_", "sub_")}
"""Methods that take the arguments of an operation: a call through `torch.ops` takes a microsecond more."""
READ_AHEAD = 2**18
"""Least bytes of a float32 matrix that is summed, a tile at a time, before one row is multiplied by it. MKL's product
reads memory at half of the speed of a sum; after the sum the tile is in the core's own cache. Products in half
precision read as fast as a sum."""
TILE = 2**20
"""Most bytes of a tile: what a core's own cache holds."""
FEW_ROWS = 5
"""Most rows that are multiplied by a matrix of at least READ_AHEAD bytes as `(w x^T)^T`: with MKL a step of 2, 4 and 5
rows is 1.67, 1.27 and 1.15 times as fast so as with `x w^T`, of 6 rows 0.98 (20M parameters). The sums are added in
another order: it is the one operation of a recorded step with other bits than the modules'."""
SHAPED = (aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full)
"""Operations that read only the shape of their tensor."""
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
EXACT = (torch.float32, torch.float64)
"""Types whose arithmetic is done in the type itself, so that a number made a tensor of it gives the same bits."""


class Replayed:
    """The recorded step as calls: `step(tokens)` returns the logits `[B, V]` and writes the next state into `state`.

    The constructor takes the second step, whose logits are `logits_BV`. `more` are the tensors that the step returns
    after the next state; each step overwrites them. Once no later operation reads a result, its memory is given to
    another result, so that all of them together need little more than those of one layer.
    """

    def __init__(self, recorded: Recorded, tokens_B1: Tensor, active_B: Tensor, state: Sequence[Tensor]) -> None:
        self._tokens_B1 = tokens_B1.clone()
        self._calls: list[Callable[[], Any]] = []
        self._weights = list(recorded.constants.values())
        self._addresses = self._current_addresses()
        self._roots = recorded.roots
        self._written = {self._roots[slot] for call in recorded.calls for slot in call.writes}
        self._steady: set[Slot] = set()
        """Results that are the same at each step: they are computed once."""
        self._memory: dict[Slot, Tensor] = {}
        self._spare: dict[Any, list[Tensor]] = defaultdict(list)
        self._tensors = dict(zip(recorded.inputs, (self._tokens_B1, active_B, *state), strict=True))
        self._tensors |= recorded.constants
        last = {self._roots[slot]: i for i, call in enumerate(recorded.calls) for slot in call.reads}
        last |= {self._roots[slot]: len(recorded.calls) for slot in recorded.results}
        for i, call in enumerate(recorded.calls):
            self._add(call, last)
            for root in {self._roots[slot] for slot in call.reads if last[self._roots[slot]] == i}:
                if (memory := self._memory.pop(root, None)) is not None:
                    self._spare[memory.dtype, memory.device, len(memory)].append(memory)
        self.logits_BV, *after = [self._tensors[slot] for slot in recorded.results]
        self.more = after[len(state) :]
        self._write_state(state, after[: len(state)])
        del self._tensors, self._memory, self._spare

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        """Step with tokens `[B, 1]` and return `logits_BV`, which the next step overwrites."""
        with torch.inference_mode():  # a call is shorter without the bookkeeping of derivatives
            self._tokens_B1.copy_(tokens_B1)
            for call in self._calls:
                call()
        return self.logits_BV

    @property
    def stale(self) -> bool:
        """Return whether weights have moved to other memory."""
        return self._current_addresses() != self._addresses

    def _current_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._weights))

    def _do(self, *calls: Callable[[], Any]) -> None:
        for call in calls:
            call()
        self._calls += calls

    def _add(self, call: Call, last: dict[Slot, int]) -> None:
        """Run an operation once, and add the calls that repeat it."""
        args, kwargs = call.arguments(self._tensors)
        function = _few_rows_product if call.function is aten.mm.default and _has_few_rows(*args) else call.function
        if call.writes:
            self._do(partial(IN_PLACE.get(call.function.overloadpacket, call.function), *args, **kwargs))
            return
        again = partial(function, *args, **kwargs)
        made = again() if call.several else [again()]
        pairs = zip(call.results, made, strict=True)
        found = {slot: x for slot, x in pairs if slot is not None and slot not in self._tensors}
        new = [slot for slot in found if self._roots[slot] == slot]
        reads = set() if call.function.overloadpacket in SHAPED else {self._roots[slot] for slot in call.reads}
        steady = self._steady.issuperset(reads) and not call.random and self._written.isdisjoint(new)
        if steady:
            self._steady.update(new)
        self._tensors |= {slot: x for slot, x in found.items() if steady or slot not in new}
        new = [] if steady else [slot for slot in new if slot in last]
        if new and (call.several or not self._write(call, found[new[0]])):
            outs = [(i, self._room(slot, found[slot])) for i, slot in enumerate(call.results) if slot in new]
            self._do(partial(_write_results, again, outs))

    def _write(self, call: Call, expected: Tensor) -> bool:
        """Add calls that write the result into its memory; return False if they would not give the expected bits."""
        args, kwargs = call.arguments(self._tensors)
        out = self._room(call.makes[0], expected).zero_()
        try:
            calls = LOWERED.get(call.function.overloadpacket, _directly)(call.function, out, *args, **kwargs)
            for each in calls:
                each()
        except (KeyError, TypeError, RuntimeError):  # no such form, or not for these arguments
            return False
        if out.stride() != expected.stride() or not torch.equal(out, expected):
            return False
        self._calls += calls
        return True

    def _room(self, slot: Slot, like: Tensor) -> Tensor:
        """Return the tensor of a result, in spare or new memory."""
        if slot not in self._memory:
            size = max(0, sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True)) + 1)
            spare = self._spare[like.dtype, like.device, size]
            self._memory[slot] = spare.pop() if spare else like.new_empty(size)
            self._tensors[slot] = self._memory[slot].as_strided(like.shape, like.stride())
        return self._tensors[slot]

    def _write_state(self, state: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Write the new state into the old state's tensors; new values that lie in those tensors are copied first."""
        pairs = [(x, y) for x, y in zip(state, after, strict=True) if not _is_same(x, y)]
        held = {memory_of(x) for x in state}
        for i, (x, y) in enumerate(pairs):
            if memory_of(y) in held:
                pairs[i] = x, torch.empty_like(y)
                self._do(partial(pairs[i][1].copy_, y))
        self._do(*(partial(x.copy_, y) for x, y in pairs))


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.shape == y.shape


def _write_results(again: Callable[[], Any], outs: list[tuple[int, Tensor]]) -> None:
    found = again()
    found = (found,) if isinstance(found, Tensor) else found
    for i, out in outs:
        out.copy_(found[i])


# Forms of an operation that write into `out`; before one is used, its bits are compared with the operation's.

Calls = list[Callable[[], Any]]


def _directly(function: Any, out: Tensor, *args: Any, **kwargs: Any) -> Calls:
    if function in ARITHMETIC and out.dtype in EXACT:
        # Making a tensor of a number takes longer than the operation.
        args = tuple([x if isinstance(x, Tensor) else out.new_tensor(x) for x in args])
    return [partial(WRITING[function.overloadpacket], *args, out=out, **kwargs)]


def _has_few_rows(x_BC: Tensor, w_CD: Tensor) -> bool:
    on_cpu = x_BC.device.type == "cpu" and x_BC.dtype == torch.float32
    return on_cpu and 2 <= x_BC.shape[0] <= FEW_ROWS and w_CD.t().is_contiguous() and w_CD.nbytes >= READ_AHEAD


def _few_rows_product(x_BC: Tensor, w_CD: Tensor) -> Tensor:
    return torch.mm(w_CD.t(), x_BC.t()).t().contiguous()


def _multiplied(function: Any, out: Tensor, x_BC: Tensor, w_CD: Tensor) -> Calls:
    if _has_few_rows(x_BC, w_CD):
        out_DB = out.new_empty(out.shape[::-1])
        return [partial(torch.mm, w_CD.t(), x_BC.t(), out=out_DB), partial(out.copy_, out_DB.t())]
    whole, w_DC = _directly(function, out, x_BC, w_CD), w_CD.t()
    one_row = out.shape[0] == 1 and out.device.type == "cpu" and out.dtype == torch.float32
    if not one_row or w_DC.nbytes < READ_AHEAD or not w_DC.is_contiguous():
        return whole
    rows = max(1, TILE // (64 * w_DC.shape[1])) * 16  # kernels take up to 16 outputs at a time
    calls: Calls = []
    for tile_DC, part in zip(w_DC.split(rows), out.split(rows, 1), strict=True):
        calls += [tile_DC.sum, *_directly(function, part, x_BC, tile_DC.t())]
    for each in calls:
        each()
    return calls if torch.equal(out, torch.mm(x_BC, w_CD)) else whole


def _copied(function: Any, out: Tensor, x: Tensor, **kwargs: Any) -> Calls:
    return [partial(out.copy_, x)]


def _padded(function: Any, out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0.0) -> Calls:
    inner = out
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        inner = inner.narrow(-dim, before, out.shape[-dim] - before - after)
    return [partial(out.fill_, value), partial(inner.copy_, x)]


def _filled(function: Any, out: Tensor, x: Tensor, mask: Tensor, value: Any) -> Calls:
    return [partial(out.copy_, x), partial(out.masked_fill_, mask, value)]


def _rolled(function: Any, out: Tensor, x: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> Calls:
    if len(dims) != 1:
        raise TypeError("two copies roll one dimension alone")
    size, shift = x.shape[dims[0]], shifts[0] % x.shape[dims[0]]
    first, last = x.split([size - shift, shift], dims[0])
    to_first, to_last = out.split([shift, size - shift], dims[0])
    return [partial(to_first.copy_, last), partial(to_last.copy_, first)]


def _looked_up(function: Any, out: Tensor, table: Tensor, rows: Tensor, *rest: Any) -> Calls:
    return [partial(torch.index_select, table, 0, rows.view(-1), out=out.view(-1, table.shape[1]))]


LOWERED: dict[Any, Callable[..., Calls]] = {
    aten.clone: _copied, aten._to_copy: _copied, aten.constant_pad_nd: _padded, aten.masked_fill: _filled,
    aten.roll: _rolled, aten.embedding: _looked_up, aten.mm: _multiplied,
}  # fmt: skip
