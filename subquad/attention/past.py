"""The tokens before these, as a layer sees them: one interface for mechanisms, and its interpreters.

A mechanism's `mix(x, past)` uses `start`, `extended`, `values` and `keep`, and reads the memories that it kept; it does
not depend on the interpreter. A memory is an immutable value that holds what tokens write, and has

    slots                                   the names of its entries in a state, after its own name
    read(q, before, at) -> (y, after)       what queries find, and the entries after these tokens
    write(before, at) -> after              the entries alone, if they cost much less
    read_all(q, at) -> y                    the bidirectional form
    literal(q, causal) -> y                 the definition: dense weights times values
    summary(), merge, empty, begin          a monoid over stretches of tokens, for other processes

where `before` are the entries before these tokens (None: there are none) and `at` is the `Past`.

Shape letters: B batch, T tokens, S tokens with those before them, D model width, C channels, H heads, V value channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from subquad.ops.caches import advance, last_slots
from subquad.ops.padding import real_slots
from subquad.parallel import active_group
from subquad.parallel.exchange import earlier, last_before, prefix
from subquad.per_thread import held_by_thread
from subquad.state import State

Tensors = tuple[Tensor, ...]
IN_PLACE = "in_place"
"""Entry of a state that has a static cache: its keys and values are ring buffers that decoding writes in place."""


Entries = dict[str, Tensor]
"""Entries of a memory, by its slots."""
Convert = Callable[[Any, Entries], Entries]
"""Maps a memory and its entries to those of another kind of state."""


class Kept(NamedTuple):
    """A memory that queries of these tokens can read, once."""

    past: Past
    name: str
    memory: Any
    before: Tensors | None
    """Its entries before these tokens; None: there are none."""

    def read(self, q: Any) -> Tensor:
        """Return what the queries find, `[B, H, T, V]`. Raises `RuntimeError` for a second read."""
        if self.past.unread.pop(self.name, None) is None:
            raise RuntimeError(f"memory {self.name!r} is read twice: keep one for each read")
        return self.past.read(self, q)


class Past:
    """The interpreter `fast`: the engines, and the state after these tokens. The others change what they override.

    `lengths_B` says how many tokens of each row are real (None: all), and in an active group the tokens are this
    rank's part of a sequence.
    """

    def __init__(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> None:
        self.tokens, self.lengths = x_BTD.shape[1], lengths_B
        self.mask = None if lengths_B is None else real_slots(lengths_B, self.tokens)
        """Bool `[B, T]`, True for a real token; None if all are."""
        given: dict[str, Any] = {} if state is None else state.entries
        self.handed: Any = given.get("handed")
        """The value that the layer below hands on in the state; None: nothing."""
        self.given: dict[str, Any] | None = given if "seen" in given else None
        """Entries of the state before these tokens; None at the start."""
        self.group = active_group()
        self.start: Any = 0
        """Position of the first token: an int, or a tensor `[B]`."""
        if self.given is not None:
            self.start = given["seen"]
        elif self.group is not None:
            self.start = self.group.offset(self.tokens)
        seen = self.start + self.tokens if lengths_B is None else advance(self.start, self.tokens, lengths_B)
        self.entries: dict[str, Any] = {"seen": seen}
        """Entries of the state after these tokens."""
        self.unread: dict[str, Any] = {}
        """Memories that were kept and not read yet, by name."""

    def hand_on(self, x: Tensor) -> None:
        """Hand `x` to the layer above."""
        self.entries["handed"] = x

    def first(self, count: int, name: str) -> Past | None:
        """Return the past of those of these tokens that may be among a sequence's first `count`.

        None if all of those came before. The entries kept in it under `name` are removed from the state once `count`
        tokens have been read.
        """
        if self.given is not None and not any(entry.startswith(f"{name}_") for entry in self.given):
            return None
        first, seen = copy(self), self.entries["seen"]
        first.tokens = min(count, self.tokens)
        if self.lengths is not None:
            first.lengths = self.lengths.clamp(max=count)
            first.mask = real_slots(first.lengths, first.tokens)
        if count < self.tokens:  # the first rank has all of them
            first.group = None
        if isinstance(seen, int) and seen >= count:
            first.entries = {}
        return first

    def values(self, v_BHTV: Tensor) -> Tensor:
        """Mark the values, in whose place `literal` can put the identity, which gives the mechanism's weights."""
        return v_BHTV

    def keep(self, **memories: Any) -> list[Kept]:
        """Keep memories under these names, which can then be read; earlier ranks' entries come in one exchange."""
        self.unread.update(memories)
        given = self.given
        if given is not None:
            items = memories.items()
            return [Kept(self, name, m, tuple([given[name + slot] for slot in m.slots])) for name, m in items]
        befores: Any = [None] * len(memories)
        if self.group is not None:
            befores = from_earlier_ranks(list(memories.values()), self)
        return [Kept(self, *item, before) for item, before in zip(memories.items(), befores, strict=True)]

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Read a memory, and keep its entries after these tokens."""
        _, name, memory, before = kept
        y_BHTV, after = memory.read(q, before, self)
        for slot, x in zip(memory.slots, after, strict=True):
            self.entries[name + slot] = x
        return y_BHTV

    def extended(self, name: str, x_BTC: Tensor, count: int) -> Tensor:
        """Return the `count` rows before these, then these, `[B, count + T, C]`; missing rows are zeros."""
        if self.given is not None:
            x_BSC = torch.cat([self.given[name].to(x_BTC.dtype), x_BTC], 1)
        elif self.group is None:
            x_BSC = F.pad(x_BTC, (0, 0, count, 0))
        else:
            spans = last_before(count, self.tokens, self.group.size)
            (before_B1NC,) = earlier(spans, self.group, x_BTC[:, None])
            x_BSC = F.pad(torch.cat([before_B1NC[:, 0], x_BTC], 1), (0, 0, count - before_B1NC.shape[2], 0))
        if self.lengths is None:  # a copy: a view would keep a whole prompt's rows alive
            self.entries[name] = x_BSC[:, self.tokens :].clone()
        else:
            self.entries[name] = last_slots(x_BSC[:, None], count, self.lengths + count)[:, 0]
        return x_BSC


class Whole(Past):
    """The interpreter `bidirectional`: queries find all tokens, and the state counts them only."""

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Read a memory of all tokens."""
        y_BHTV: Tensor = kept.memory.read_all(q, self)
        return y_BHTV

    def extended(self, name: str, x_BTC: Tensor, count: int) -> Tensor:
        """Raise an error: a bidirectional form would need tokens of both sides."""
        raise NotImplementedError("a bidirectional layer has no tokens before these")


class InPlace(Past):
    """The interpreter `in place`: one token of each row, whose keys and values are written into the static cache."""

    def __init__(self, x_B1D: Tensor, state: State, lengths_B: Tensor | None) -> None:
        if x_B1D.shape[1] != 1 or lengths_B is not None:
            given = f"{x_B1D.shape[1]} tokens{'' if lengths_B is None else ' with padding'}"
            raise ValueError(f"decoding in place reads one token of each row, without padding, got {given}")
        super().__init__(x_B1D, state, None)
        self.entries[IN_PLACE] = 1

    def keep(self, **memories: Any) -> list[Kept]:
        """Keep memories under these names, with their static cache where they have one."""
        self.unread.update(memories)
        given = self.given or {}
        slots = {name: getattr(memory, "static_slots", memory.slots) for name, memory in memories.items()}
        return [
            Kept(self, name, m, tuple([given[name + slot] for slot in slots[name]])) for name, m in memories.items()
        ]

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Read a memory in place if it has a static cache, and others as usual."""
        _, name, memory, cache = kept
        if not hasattr(memory, "static_slots"):
            return super().read(kept, q)
        assert cache is not None
        for slot, x in zip(memory.static_slots, cache, strict=True):
            self.entries[name + slot] = x
        y_BHTV: Tensor = memory.read_in_place(q, cache, self)
        return y_BHTV


class Draft(Past):
    """The interpreter `draft`: fast, and the tokens can be taken back: what they wrote is written again in part.

    It keeps what the tokens wrote and their queries, as much as their projections, and no state.
    """

    def __init__(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None = None) -> None:
        super().__init__(x_BTD, state, lengths_B)
        self._like_BT0 = x_BTD.new_empty(*x_BTD.shape[:2], 0)
        self._first: tuple[int, str] | None = None
        self._reads: list[tuple[str, Any, Any, tuple[int, str] | None]] = []
        self._rows: list[tuple[str, Tensor, int]] = []

    def first(self, count: int, name: str) -> Past | None:
        """Return the past of the first tokens, whose reads are done again as theirs."""
        first = super().first(count, name)
        if isinstance(first, Draft):
            first._first = count, name
        return first

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Read a memory as usual."""
        self._reads.append((kept.name, kept.memory, q, self._first))
        return super().read(kept, q)

    def extended(self, name: str, x_BTC: Tensor, count: int) -> Tensor:
        """Return the rows as usual."""
        x_BSC = super().extended(name, x_BTC, count)
        self._rows.append((name, x_BSC, count))
        return x_BSC

    @property
    def device(self) -> torch.device:
        """Return the device of these tokens."""
        return self._like_BT0.device

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are kept for these tokens."""
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            found.append(x)
            return x

        self.map(note)
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Draft:
        """Return the same tokens with `change(x)` in place of each tensor that is kept, in the order of `tensors`."""

        def changed(values: dict[str, Any]) -> dict[str, Any]:
            held = {name: x for name, x in values.items() if isinstance(x, Tensor) and not isinstance(x, Parameter)}
            return {name: change(x) for name, x in held.items()}

        after = copy(self)
        after._rows = [(name, change(x_BSC), count) for name, x_BSC, count in self._rows]
        after._reads = [
            (name, replace(memory, **changed(vars(memory))), changed({"q": q}).get("q", q), first)
            for name, memory, q, first in self._reads
        ]
        after.entries = self.entries | changed({name: x for name, x in self.entries.items() if name == "handed"})
        return after

    def release(self) -> None:
        """Forget the states before and after these tokens."""
        self.given, self.entries = None, {name: x for name, x in self.entries.items() if name == "handed"}

    def entries_after(self, lengths: int | Tensor, given: dict[str, Any] | None) -> dict[str, Any]:
        """Return the state's entries after the first `lengths` of these tokens, a number or one for each row.

        `given` are the entries before them (None: there are none). Nothing is projected again.
        """
        n, lengths_B = self.tokens, self.lengths
        if isinstance(lengths, Tensor):
            lengths_B = lengths.to(self.device).expand(self._like_BT0.shape[0])
        else:
            n, lengths_B = lengths, None if lengths_B is None else lengths_B.clamp(max=lengths)
        past = Past(self._like_BT0[:, :n], None if given is None else State(given), lengths_B)
        for name, memory, q, first in self._reads:
            at = past if first is None else past.first(*first)
            if at is not None:
                held = None if at.given is None else tuple([at.given[name + slot] for slot in memory.slots])
                written = first_tokens(memory, n)
                after = written.write(held, at) if hasattr(written, "write") else written.read(q[:, :, :n], held, at)[1]
                at.entries |= {name + slot: x for slot, x in zip(memory.slots, after, strict=True)}
        for name, x_BSC, count in self._rows:
            end_B = None if lengths_B is None else lengths_B + count
            past.entries[name] = last_slots(x_BSC[:, None, : count + n], count, end_B)[:, 0]
        if "handed" in self.entries:
            past.hand_on(self.entries["handed"])
        return past.entries


def first_tokens(memory: Any, count: int) -> Any:
    """Return a memory of the first `count` tokens: what tokens wrote is `[B, H, T]` or `[B, H, T, C]`."""
    held = {name: x for name, x in vars(memory).items() if isinstance(x, Tensor) and x.ndim > 2}
    return replace(memory, **{name: x[:, :, :count] for name, x in held.items()})


_drafts: dict[int, list[Draft]] = {}
"""The drafts of the layers that are called, by thread."""


def active_drafts() -> list[Draft] | None:
    """Return the list to which causal layers add what they read; None outside of `drafting`."""
    return _drafts.get(threading.get_ident()) if _drafts else None


@contextmanager
def drafting() -> Iterator[list[Draft]]:
    """Within the block, causal layers add their `Draft` to the list, in the order of their calls."""
    drafts = list[Draft]()
    try:
        with held_by_thread(_drafts, drafts):
            yield drafts
    finally:
        for draft in drafts:
            draft.release()


class Converted(Past):
    """Turn a state into one of another kind: `mix` runs on zero tokens, and `convert` maps each memory's entries."""

    def __init__(self, none_B0D: Tensor, state: State, convert: Convert) -> None:
        super().__init__(none_B0D, state, None)
        self._convert = convert

    def keep(self, **memories: Any) -> list[Kept]:
        """Keep memories under these names."""
        self.unread.update(memories)
        return [Kept(self, name, memory, None) for name, memory in memories.items()]

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Keep the converted entries, and return no outputs."""
        _, name, memory, _ = kept
        slots, given = (*memory.slots, *getattr(memory, "static_slots", ())), self.given or {}
        found = {slot: given[name + slot] for slot in slots if name + slot in given}
        self.entries |= {name + slot: x for slot, x in self._convert(memory, found).items()}
        y_BHTV: Tensor = memory.v.new_zeros(*q.shape[:3], memory.v.shape[-1])
        return y_BHTV


class Literal(Past):
    """The interpreter `literal`, the definition; with `eye` the values are the identity, so that it gives weights."""

    def __init__(self, x_BTD: Tensor, *, causal: bool, eye: bool = False) -> None:
        super().__init__(x_BTD, None, None)
        self._causal, self._eye = causal, x_BTD.shape[1] if eye else None

    def values(self, v_BHTV: Tensor) -> Tensor:
        """Return the values, or the identity's rows of these tokens, `[B, H, T, T]`."""
        if self._eye is None:
            return v_BHTV
        rows_TT = torch.eye(v_BHTV.shape[2], self._eye, dtype=v_BHTV.dtype, device=v_BHTV.device)
        return rows_TT.expand(*v_BHTV.shape[:2], -1, -1)

    def read(self, kept: Kept, q: Any) -> Tensor:
        """Return the product of the weights and the values, in the inputs' precision."""
        with torch.autocast(kept.memory.v.device.type, enabled=False):
            y_BHTV: Tensor = kept.memory.literal(q, self._causal)
        return y_BHTV


def from_earlier_ranks(memories: list[Any], at: Past) -> list[Tensors | None]:
    """Return each memory's entries after the earlier ranks' tokens; all summaries travel in one exchange."""
    assert at.group is not None
    summed = [memory for memory in memories if hasattr(memory, "summary")]
    begun: dict[int, Tensors] = {}
    if summed:
        parts = [memory.summary() for memory in summed]
        sizes = [len(part) for part in parts]

        def merge(earlier: Tensors, later: Tensors, /) -> Tensors:
            pairs = zip(summed, cut(earlier, sizes), cut(later, sizes), strict=True)
            return sum((memory.merge(a, b) for memory, a, b in pairs), ())

        empty = sum((memory.empty for memory in summed), ())
        found = cut(prefix(sum(parts, ()), merge, empty, at.group), sizes)
        begun = {id(memory): memory.begin(part) for memory, part in zip(summed, found, strict=True)}
    return [begun[id(memory)] if id(memory) in begun else memory.fetched(at) for memory in memories]


def cut(x: Tensors, sizes: list[int]) -> list[Tensors]:
    """Cut a tuple into tuples of these sizes."""
    parts = iter(x)
    return [tuple(next(parts) for _ in range(size)) for size in sizes]
