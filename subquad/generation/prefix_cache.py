"""States after the beginnings of prompts, so that a prompt that begins as an earlier one goes on from there."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from subquad.config import check_at_least
from subquad.memory import total_bytes
from subquad.models import Decoder
from subquad.state import State


class PrefixCounts(NamedTuple):
    """What a `PrefixCache` has done so far, and the bytes of its states now.

    `hits` and `misses` count the prompts of at least one whole piece, `tokens` those tokens that were not read again,
    `evictions` the states that made room for others.
    """

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    evictions: int = 0
    nbytes: int = 0


class PrefixCache:
    """A tree of one model's states: a node is the state after some pieces of a prompt, its children read one more.

    Nodes are found by `prefix_keys`. The states are in the host's memory, at most `max_bytes` of them. Where a prompt
    is found or kept, all nodes from the root to its own are used, so the least recently used node, which goes first, is
    always a leaf. States that grow with the text (`full`) share no memory: each holds all its keys and values. The
    model's weights must stay as they are. Raises `ValueError` for fewer bytes than 1, or more than the host has.
    """

    def __init__(self, max_bytes: int) -> None:
        check_at_least(1, prefix_bytes=max_bytes)
        memory = total_bytes("cpu")
        if memory is not None and max_bytes > memory:
            raise ValueError(
                f"prefix_bytes must be at most the host's memory, {memory} bytes, got {max_bytes}; 0 keeps no states"
            )
        self._max_bytes = max_bytes
        self._states: OrderedDict[bytes, State] = OrderedDict()
        self._counts = PrefixCounts()

    @property
    def counts(self) -> PrefixCounts:
        """Return what was done so far."""
        return self._counts

    def find(self, keys: Sequence[bytes], /) -> State | None:
        """Return the state after as many of a prompt's pieces as are known, None for none; `keys` are all its keys."""
        known = list(takewhile(self._states.__contains__, keys))
        self._use(known)
        if not known:
            self._count(misses=min(1, len(keys)))
            return None
        state = self._states[known[-1]]
        self._count(hits=1, tokens=int(state.seen))
        return state

    def keep(self, keys: Sequence[bytes], state: State, /) -> None:
        """Keep the state after a prompt's pieces, those of `keys`, unless the state before the last one was evicted."""
        parents, key = keys[:-1], keys[-1]
        if key not in self._states:
            if parents and parents[-1] not in self._states:
                return
            self._states[key] = state = state.to("cpu")
            self._count(nbytes=state.nbytes)
        self._use(keys)
        while self._counts.nbytes > self._max_bytes:
            _, evicted = self._states.popitem(last=False)
            self._count(evictions=1, nbytes=-evicted.nbytes)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Make the nodes the most recently used ones, each after its children."""
        for key in reversed(keys):
            self._states.move_to_end(key)

    def _count(self, **more: int) -> None:
        self._counts = self._counts._replace(**{name: getattr(self._counts, name) + n for name, n in more.items()})


def default_bytes(model: Decoder) -> int:
    """Return the most bytes of states that a server keeps by default: 1 GiB, or an eighth of the host's memory if less.

    It is 0 for a model that reads a prompt in one piece.
    """
    if model.predicts_last is not None:
        return 0
    memory = total_bytes("cpu")
    return 1 << 30 if memory is None else min(1 << 30, memory // 8)


def prefix_keys(tokens: Sequence[int], piece: int) -> list[bytes]:
    """Return a key of the tokens up to the end of each whole piece of `piece` tokens: SHA-256 of all of them."""
    digest, keys = hashlib.sha256(), []
    for end in range(piece, len(tokens) + 1, piece):
        digest.update(array("q", tokens[end - piece : end]).tobytes())
        keys.append(digest.digest())
    return keys
