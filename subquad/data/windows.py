"""Windows of tokens, and the order in which an epoch visits them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from subquad.data.shards import TokenShard


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens, each beginning `stride` tokens after the one before.

    Item i is `{"input_ids": [length], "labels": [length]}`, both the same int64 tokens: the model shifts labels. By
    default a window begins with the last token of the one before (`stride = length - 1`), so every token but a shard's
    first is predicted once. A model that predicts only the last `stride` tokens of a window predicts all but the
    shard's first `length - stride` once. The end, fewer than `stride` tokens that fill no window, is left out.
    Raises `ValueError` for a length below 2 or above the shard's, and for a stride below 1 or above `length - 1`.
    """

    def __init__(self, shard: TokenShard, length: int, *, stride: int | None = None) -> None:
        count_windows(len(shard), length, stride)
        if length > len(shard):
            raise ValueError(
                f"a window of {length} tokens is longer than {shard.path}, which has {len(shard)}; "
                "use a shorter window or more text"
            )
        self.shard = shard
        self.length = length
        self.stride = length - 1 if stride is None else stride

    def __len__(self) -> int:
        return count_windows(len(self.shard), self.length, self.stride)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range: there are {len(self)}")
        start = index * self.stride
        tokens = torch.from_numpy(self.shard.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}


class WindowParts(Dataset[dict[str, Tensor]]):
    """Each of some windows as `parts` short ones of `length` tokens; item i is part `i % parts` of window `i // parts`.

    A part begins with the last token of the one before, so that all but the last tokens of a window are predicted as
    they are there, the first `length` of them with the same context. Raises `ValueError` where a window is too short.
    """

    def __init__(self, windows: Dataset[dict[str, Tensor]], length: int, parts: int) -> None:
        size = len(windows[0]["input_ids"])
        if parts * (length - 1) + 1 > size:
            raise ValueError(f"windows of {size} tokens can't be cut into {parts} of {length}")
        self.windows, self.length, self.parts = windows, length, parts

    def __len__(self) -> int:
        return len(self.windows) * self.parts  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"part {index} is out of range: there are {len(self)}")
        window, part = divmod(index, self.parts)
        start = part * (self.length - 1)
        return {name: tokens[start : start + self.length] for name, tokens in self.windows[window].items()}


def count_windows(tokens: int, length: int, stride: int | None = None) -> int:
    """Windows of `length` in so many tokens. Raises `ValueError` for a length and a stride that no window has."""
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, one to read and one to predict, got length={length}")
    if stride is not None and not 1 <= stride <= length - 1:
        raise ValueError(
            f"windows of {length} tokens predict {length - 1} each: stride must be between 1 and {length - 1}, "
            f"got {stride}"
        )
    return max(0, (tokens - length) // (length - 1 if stride is None else stride) + 1)


class EpochOrder(Sampler[int]):
    """A permutation of 0..n-1 that `seed` and `epoch` fix.

    `state_dict` and `load_state_dict` carry the position: iterating after a load goes on with the next index. Each
    further iteration begins at the start; `set_epoch` chooses the next epoch's permutation.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one item, got n={n}")
        self.n = n
        self.seed = seed
        self.epoch = epoch
        self.position = 0
        self._resume = False

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        start = self.position if self._resume else 0
        self._resume = False
        for place, index in enumerate(self.items(start), start):
            self.position = place + 1
            yield index

    def items(self, start: int) -> Iterator[int]:
        """The order from a place on."""
        return iter(self.permutation()[start:].tolist())

    def permutation(self) -> Tensor:
        """The whole epoch's order `[n]`."""
        word = hashlib.sha256(f"{self.seed}:{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "big"))
        return torch.randperm(self.n, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Choose an epoch; another one than the present begins at its start."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0
            self._resume = False

    def state_dict(self) -> dict[str, Any]:
        """The order's identity and how many indices of this epoch were given out."""
        return {"n": self.n, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` stood; `ValueError` where it belongs to another order."""
        for name in ("n", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved order has {name}={state[name]}, this one {name}={getattr(self, name)}: "
                    "data or seed have changed"
                )
        if not 0 <= state["position"] <= self.n:
            raise ValueError(f"the saved position must lie in 0..{self.n}, got {state['position']}")
        self.epoch = state["epoch"]
        self.position = state["position"]
        self._resume = True
