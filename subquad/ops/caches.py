"""The KV cache of a state: keys and values of the tokens in reach, appended and cut.

Shape letters: B batch, G key heads, T new tokens, N kept ones, S all of them, K channels of a head.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from subquad.tracing import is_transformed

SPARE, LEAST_SPARE = 8, 16
"""A growing cache gets room for one more token for every `SPARE` tokens, and for at least `LEAST_SPARE`."""


def appended(old_BGNK: Tensor, new_BGTK: Tensor, /) -> Tensor:
    """Return `cat([old, new], 2)`; without gradients, `old` is copied only if the memory behind it is in use.

    Copying the cache for every token would double the cost of reading it. So a result has spare memory behind its last
    token, which its first continuation writes to; a second continuation copies. The values of `old` never change.
    """
    N, S = old_BGNK.shape[2], old_BGNK.shape[2] + new_BGTK.shape[2]
    recorded = torch.compiler.is_compiling() or type(new_BGTK) is not Tensor or is_transformed()
    if torch.is_grad_enabled() or recorded or S == N or old_BGNK.dtype != new_BGTK.dtype:
        return torch.cat([old_BGNK.to(new_BGTK.dtype), new_BGTK], 2)
    room: _Room | None = _ROOMS.get(old_BGNK)
    if room is None or not room.claim(N, S):
        room = _Room(new_BGTK.new_empty(*old_BGNK.shape[:2], S + max(LEAST_SPARE, S // SPARE), old_BGNK.shape[3]), S)
        room.buffer[:, :, :N] = old_BGNK
    room.buffer[:, :, N:S] = new_BGTK
    all_BGSK: Tensor = room.buffer[:, :, :S]
    _ROOMS[all_BGSK] = room
    return all_BGSK


class _Room:
    """A buffer whose first `used` slots along dimension 2 are in use."""

    def __init__(self, buffer: Tensor, used: int) -> None:
        self.buffer = buffer
        self.used = used
        self.lock = threading.Lock()

    def claim(self, begin: int, end: int) -> bool:
        """Take the slots from `begin` to `end`; False if they are in use or don't exist."""
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        with self.lock:
            if self.used != begin or end > self.buffer.shape[2]:
                return False
            self.used = end
            return True


# Not an attribute of the tensors: copies, by `copy` or `pickle`, would carry it with them.
_ROOMS = WeakTensorKeyDictionary()


def advance(seen: int | Tensor, tokens: int, lengths_B: Tensor | None) -> int | Tensor:
    """Return the tokens seen after `tokens` more slots, of which row b has `lengths_B[b]` real ones."""
    return seen + tokens if lengths_B is None else torch.as_tensor(seen, device=lengths_B.device) + lengths_B


def last_slots(x_BGSK: Tensor, kept: int, lengths_B: Tensor | None) -> Tensor:
    """Return the last `kept` real slots of each row; a shorter row repeats slot 0, at a negative position."""
    S = x_BGSK.shape[2]
    if lengths_B is None and kept == S:
        return x_BGSK
    if lengths_B is None:
        last_BGSK = x_BGSK[:, :, S - kept :]
        # A view of few tokens would keep a long prompt in memory, so it is copied; a decoding step copies nothing.
        spare = S - kept
        return last_BGSK if spare <= kept // SPARE else last_BGSK.clone(memory_format=torch.contiguous_format)
    slots_BS = (lengths_B[:, None] - kept + torch.arange(kept, device=x_BGSK.device)).clamp(min=0)
    return x_BGSK.gather(2, slots_BS[:, None, :, None].expand(*x_BGSK.shape[:2], kept, x_BGSK.shape[3]))


def first_slots(new_BGTK: Tensor, old_BGNK: Tensor | None, seen: int | Tensor, count: int) -> Tensor:
    """Return the first `count` tokens of each row, `old` ones and then new ones; empty slots hold arbitrary numbers."""
    B, G, T, K = new_BGTK.shape
    if T == 0 or count == 0:
        return new_BGTK.new_zeros(B, G, count, K) if old_BGNK is None else old_BGNK
    if old_BGNK is None:
        return new_BGTK[:, :, torch.arange(count, device=new_BGTK.device).clamp(max=T - 1)]
    place_N = torch.arange(count, device=new_BGTK.device)
    both_BGSK = torch.cat([old_BGNK.to(new_BGTK.dtype), new_BGTK], 2)
    if isinstance(seen, int):
        return both_BGSK[:, :, torch.where(place_N < seen, place_N, count + (place_N - seen).clamp(0, T - 1))]
    seen_B1 = seen.to(new_BGTK.device).expand(B)[:, None]
    place_BN = torch.where(place_N < seen_B1, place_N, count + (place_N - seen_B1).clamp(0, T - 1))
    return both_BGSK.gather(2, place_BN[:, None, :, None].expand(B, G, count, K))
