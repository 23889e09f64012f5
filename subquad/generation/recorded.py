"""The operations of a decoding step, noted while it runs.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from subquad.state import State

aten = torch.ops.aten
READING = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Methods that read values without an operation."""


class Slot(int):
    """The number of a tensor in a recording."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class Call(NamedTuple):
    """An operation; `Slot`s stand for the tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Slot | None]
    """The slots of the values that it returns; None for a value that is not a tensor."""
    several: bool
    """Whether it returns a list or tuple of values."""

    @property
    def reads(self) -> list[Slot]:
        """Return the slots of the arguments."""
        return leaves((self.args, self.kwargs), Slot)

    @property
    def makes(self) -> list[Slot]:
        """Return the slots of the results."""
        return [slot for slot in self.results if slot is not None]

    @property
    def writes(self) -> list[Slot]:
        """Return the slots of the arguments that it changes."""
        found = []
        if self.function._schema.is_mutable:
            for i, argument in enumerate(self.function._schema.arguments):
                if argument.alias_info and argument.alias_info.is_write:
                    found.append(self.args[i] if i < len(self.args) else self.kwargs.get(argument.name))
        return leaves(found, Slot)

    @property
    def random(self) -> bool:
        """Return whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def arguments(self, values: Any) -> tuple[Any, Any]:
        """Return the arguments with `values[slot]` for each slot."""
        change = values.__getitem__
        return mapped(self.args, Slot, change), mapped(self.kwargs, Slot, change)


class Recording(TorchDispatchMode):
    """Note the operations within the block; `refused` says why they cannot be repeated as a list, or is None."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.refused: str | None = None
        self.calls: list[Call] = []
        self.roots: dict[Slot, Slot] = {}
        """For each slot, the slot of the tensor whose memory it shows: a view's base, or itself."""
        self.constants: dict[Slot, Tensor] = {}
        """Tensors that no operation made, such as weights."""
        self._slots, self._numbers = WeakTensorKeyDictionary(), count()
        self._reading, self._caching = _Reading(self), torch.is_autocast_cache_enabled()
        self.inputs = [self._new(x) for x in inputs]

    def __enter__(self) -> Recording:
        # A cast that autocast has cached would be a constant here, and later changes of the weight would be ignored.
        torch.set_autocast_cache_enabled(False)
        self._reading.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reading.__exit__(*error)
        torch.set_autocast_cache_enabled(self._caching)

    def slot(self, x: Tensor) -> Slot:
        """Return the slot of a tensor; one that no operation made is a constant."""
        if x not in self._slots:
            if type(x) not in (Tensor, Parameter):
                self.refused = f"a tensor is a {type(x).__name__}"
            self.constants[self._new(x)] = x
        found: Slot = self._slots[x]
        return found

    def _new(self, x: Tensor, given: Sequence[Tensor] = ()) -> Slot:
        slot = self._slots[x] = Slot(next(self._numbers))
        root = next((self.slot(other) for other in given if memory_of(other) == memory_of(x)), slot)
        self.roots[slot] = self.roots.get(root, slot)
        return slot

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = leaves((args, kwargs), Tensor)
        noted = mapped((args, kwargs or {}), Tensor, self.slot)
        out = function(*args, **(kwargs or {}))
        made = list(out) if isinstance(out, list | tuple) else [out]
        by_values = function is not aten.index.Tensor or any(x.dtype in (torch.bool, torch.uint8) for x in read)
        if torch.Tag.inplace_view in function.tags:
            self.refused = f"{function} changes the shape of a tensor"
        elif torch.Tag.dynamic_output_shape in function.tags and by_values:
            self.refused = f"the shape that {function} returns depends on values"
        elif any(isinstance(x, list | tuple) for x in made):
            self.refused = f"{function} returns lists"
        elif any(isinstance(x, Tensor) for x in made):
            slots = [(self._slots.get(x) or self._new(x, read)) if isinstance(x, Tensor) else None for x in made]
            self.calls.append(Call(function, noted[0], noted[1], slots, made[0] is not out))
        elif read:
            self.refused = f"{function} reads values"
        return out


class _Reading(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READING:
            self._recording.refused = f"{function.__name__} reads values"
        return function(*args, **(kwargs or {}))


class Recorded:
    """The operations of `step(*inputs)`, recorded while it ran.

    `outputs` are those of the step that was recorded; `refused` says why it cannot be repeated, or is None.
    """

    def __init__(self, step: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
        with Recording(inputs) as recording:
            self.outputs = step(*inputs)
            results = [recording.slot(x) for x in self.outputs]
        self.refused = recording.refused
        self.inputs, self.roots, self.constants = recording.inputs, recording.roots, recording.constants
        self.calls, self.results = self._simplified(recording.calls, results)

    def _simplified(self, calls: list[Call], results: list[Slot]) -> tuple[list[Call], list[Slot]]:
        """Return calls and results without repetitions (cosines, sines and masks of each layer) and unused calls."""
        same = _Renamed()
        first: dict[str, Call] = {}
        written = {self.roots[slot] for call in calls for slot in call.writes}
        kept: list[Call] = []
        for call in calls:
            args, kwargs = call.arguments(same)
            call = call._replace(args=args, kwargs=kwargs)
            again = call
            if not call.random and written.isdisjoint(self.roots[slot] for slot in [*call.reads, *call.makes]):
                again = first.setdefault(f"{call.function} {call.args} {call.kwargs}", call)
            if again is call:
                kept.append(call)
            else:
                same.update(zip(call.makes, again.makes, strict=True))
        results = [same[slot] for slot in results]
        # A view of a repeated result shows the memory of the first one.
        self.roots = {slot: same[root] for slot, root in self.roots.items()}
        used = {self.roots[slot] for slot in [*results, *self.inputs]}
        needed: list[Call] = []
        for call in reversed(kept):
            if not used.isdisjoint(self.roots[slot] for slot in call.makes):
                needed.append(call)
                used.update(self.roots[slot] for slot in call.reads)
        return needed[::-1], results

    def graph(self) -> GraphModule:
        """Return the step as a function of the inputs, for a compiler."""
        graph, module, values = Graph(), torch.nn.Module(), dict[Slot, Any]()
        for slot in self.inputs:
            values[slot] = graph.placeholder(f"input_{int(slot)}")
        for slot, x in self.constants.items():
            module.register_buffer(f"constant_{int(slot)}", x, persistent=False)
            values[slot] = graph.get_attr(f"constant_{int(slot)}")
        for call in self.calls:
            node = graph.call_function(call.function, *call.arguments(values))
            for i, made in enumerate(call.results):
                if made is not None:
                    values[made] = graph.call_function(getitem, (node, i)) if call.several else node
        graph.output([values[slot] for slot in self.results])
        return GraphModule(module, graph)


class _Renamed(dict[Slot, Slot]):
    def __missing__(self, slot: Slot) -> Slot:
        return slot


def mapped(x: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return arguments with `change(leaf)` for leaves of the class `kind`; torch's pytree takes ten times as long."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, list | tuple):
        return type(x)([mapped(each, kind, change) for each in x])
    return {name: mapped(each, kind, change) for name, each in x.items()} if isinstance(x, dict) else x


def leaves(x: Any, kind: type) -> list[Any]:
    """Return the leaves of the class `kind` in arguments."""
    found: list[Any] = []
    mapped(x, kind, found.append)
    return found


def memory_of(x: Tensor) -> int | None:
    """Return a number that tensors in the same memory share; None for a subclass of `Tensor`, which may have none."""
    return x.untyped_storage()._cdata if type(x) in (Tensor, Parameter) else None


Step = Callable[[Tensor, Tensor, State], tuple[Any, ...]]
FlatStep = Callable[..., list[Tensor]]


def flat(step: Step, like: State) -> FlatStep:
    """Return `step` as a function of `tokens`, `active` and the tensors of a state like `like`.

    `step` returns logits, the next state and perhaps more tensors.
    """

    def run(tokens_BK: Tensor, active_B: Tensor, *tensors: Tensor) -> list[Tensor]:
        logits, after, *more = step(tokens_BK, active_B, joined(like, tensors))
        return [logits, *split(after), *more]

    return run


def split(state: State) -> list[Tensor]:
    """Return the count `seen`, then all other tensors of a state."""
    return [state.tensor("seen"), *_others(state)]


def joined(like: State, tensors: list[Tensor] | tuple[Tensor, ...]) -> State:
    """Return the state with the structure of `like` and these tensors, as `split` returns them.

    All counts `seen` become one, so that cosines, sines and masks are the same operations in each layer.
    """
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
