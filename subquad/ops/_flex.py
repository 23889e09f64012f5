"""Engine B on PyTorch's FlexAttention: a pattern becomes a block mask, compiled once per shape.

Shape letters: B batch, H query heads, G key heads, T queries, S keys, K key channels, V value channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from subquad.ops.patterns import Pattern
from subquad.ops.slots import SCHEMA, Slots, seen_slots
from subquad.tracing import recorded

BLOCK = 128
"""Queries and keys per block; a block mask marks blocks as seen whole, in part or not at all."""
LEAST_CHANNELS = 16
"""Fewest channels that the kernels accept on a GPU."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS, GRAPHS = 64, 32
"""Sizes of the caches of masks and compiled graphs."""


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    pattern: Pattern,
    slots: Slots,
    scale: float,
    with_lse: bool = True,
    *,
    compiled: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, T, V]` in the inputs' common dtype, and logsumexp `[B, H, T]` (NaN without `with_lse`).

    Without `compiled`, and for a logsumexp on a CPU (which the compiled form lacks), FlexAttention runs uncompiled with
    all scores in memory. Raises `ValueError` for dtypes not in `DTYPES`, and for gradients on a CPU.
    """
    for x in (q_BHTK, k_BGSK, v_BGSV):
        if x.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"backend 'flex' of block_attention computes in {names}, got {x.dtype}")
    q, k, v, V = q_BHTK, k_BGSK, v_BGSV, v_BGSV.shape[-1]
    if q.device.type == "cpu":
        if recorded(q, k, v):
            raise ValueError(
                "backend 'flex' of block_attention has no gradients on a CPU, got inputs that require one; "
                "valid: reference, torch, sequential"
            )
        q, k, v = (x.detach() for x in (q, k, v))
        compiled = compiled and not with_lse
    else:  # zero channels change no score and no value
        q, k, v = (
            x if x.shape[-1] >= LEAST_CHANNELS else F.pad(x, (0, LEAST_CHANNELS - x.shape[-1])) for x in (q, k, v)
        )
    mask = _mask(q, k, pattern, slots)
    if torch.compiler.is_compiling():  # it becomes part of the caller's graph
        out, lse = _run(q, k, v, mask, scale, with_lse)
    elif compiled:
        out, lse = _graph((*_key(q, k, v, pattern, slots), scale, with_lse))(q, k, v, mask, scale, with_lse)
    else:
        with _plain():
            out, lse = _run(q, k, v, mask, scale, with_lse)
    return out[..., :V], lse


def _run(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, with_lse: bool) -> tuple[Tensor, Tensor]:
    request = flex.AuxRequest(lse=True) if with_lse else None
    result: Any = flex.flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=request
    )
    if with_lse:
        return result[0], result[1].lse.float()
    return result, q.new_full((), torch.nan).expand(q.shape[:3])


@contextmanager
def _plain() -> Iterator[None]:
    """Keep FlexAttention from compiling itself at every call, which soon reaches Dynamo's limit."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


@functools.lru_cache(maxsize=GRAPHS)
def _graph(key: tuple[Any, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the compiled function of `key`, with a code object of its own: Dynamo gives up after a few of one."""
    fresh = FunctionType(_run.__code__.replace(co_name=f"_run_{_graph.cache_info().misses}"), globals())
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(fresh, dynamic=False, fullgraph=True)
    return compiled


def _key(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, slots: Slots) -> tuple[Any, ...]:
    """Return everything that a compiled graph depends on. Positions are inputs, so decoding steps share a graph."""
    inputs = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in (q, k, v))
    rows = _only_pattern(slots), slots.q_doc_BT is None
    return pattern, rows, inputs, q.device, torch.is_grad_enabled()


def _only_pattern(slots: Slots) -> bool:
    """Return True if all queries and keys are real and begin at position 0: only the pattern fixes the mask then."""
    return slots.q_start == slots.k_start == 0 and all(x is None for x in slots[2:])


Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From a row of the batch, a head, a query slot and a key slot: True if the query may see the key."""
Listed = tuple[Tensor, Tensor, Tensor, Tensor]
"""Per row of blocks, the number `[B, 1, N]` and indices `[B, 1, N, M]` of blocks seen in part; then of whole ones."""


def _mask(q_BHTK: Tensor, k_BGSK: Tensor, pattern: Pattern, slots: Slots) -> BlockMask:
    B, T, S, device = q_BHTK.shape[0], q_BHTK.shape[2], k_BGSK.shape[2], q_BHTK.device
    if _only_pattern(slots) and not torch.compiler.is_compiling():
        return _pattern_mask(pattern, T, S, device)
    listed = listed_blocks(pattern.key(), B, T, S, device, *slots)
    return _block_mask(listed, _seen(pattern, slots, B, T, S, device), T, S)


@functools.lru_cache(maxsize=MASKS)
def _pattern_mask(pattern: Pattern, T: int, S: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # the cached mask may serve training next
        seen = _seen(pattern, Slots(0, 0), 1, T, S, device)
        return _block_mask(_pattern_blocks(pattern, T, S, device), seen, T, S)


@functools.lru_cache(maxsize=MASKS)
def _pattern_blocks(pattern: Pattern, T: int, S: int, device: torch.device) -> Listed:
    with torch.inference_mode(False):
        return _listed_by(pattern, Slots(0, 0), 1, T, S, device)


def _block_mask(listed: Listed, seen: Seen, T: int, S: int) -> BlockMask:
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen, seq_lengths=(T, S))


# An operator is one node of the caller's graph for any number of blocks. The tensors that it caches must not be in the
# memory of a CUDA graph, which is reused.
@torch.library.custom_op(
    "subquad::flex_listed_blocks",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=f"(str pattern, SymInt B, SymInt T, SymInt S, Device device, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def listed_blocks(pattern: str, B: int, T: int, S: int, device: torch.device, *given: Any) -> Listed:
    """Return the visible blocks as `Listed`."""
    rule, slots = Pattern.from_key(pattern), Slots(*given)
    if not _only_pattern(slots):
        return _listed_by(rule, slots, B, T, S, device)
    # Copies: a compiled graph may reuse an operator's output as a buffer.
    some, which, whole, whole_which = (x.clone() for x in _pattern_blocks(rule, T, S, device))
    return some, which, whole, whole_which


@listed_blocks.register_fake
def _(pattern, B, T, S, device, *slots):  # type: ignore[no-untyped-def]
    shape = 1 if _only_pattern(Slots(*slots)) else B, 1, -(-T // BLOCK)
    sizes = (shape, (*shape, -(-S // BLOCK))) * 2
    return tuple(torch.empty(size, dtype=torch.int32, device=device) for size in sizes)


def _seen(pattern: Pattern, slots: Slots, B: int, T: int, S: int, device: torch.device) -> Seen:
    if _only_pattern(slots):
        return lambda b, h, t, s: pattern.allowed(t, s)
    q_pos_BT, k_pos_BS = slots.q_pos_BT, slots.k_pos_BS
    if q_pos_BT is None or k_pos_BS is None:
        q_pos_BT = (torch.arange(T, device=device) + slots.q_start).expand(B, T)
        k_pos_BS = (torch.arange(S, device=device) + slots.k_start).expand(B, S)
    if slots.lengths_B is not None:
        k_pos_BS = k_pos_BS.masked_fill(torch.arange(S, device=device) >= slots.lengths_B[:, None], -1)
    q_BT, k_BS, q_doc_BT, k_doc_BS = q_pos_BT, k_pos_BS, slots.q_doc_BT, slots.k_doc_BS

    def seen(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        q_pos, k_pos = q_BT[b, t], k_BS[b, s]
        return pattern.allowed(q_pos, k_pos) & (q_pos >= 0) & (k_pos >= 0)

    if q_doc_BT is None or k_doc_BS is None:
        return seen
    return flex.and_masks(seen, lambda b, h, t, s: q_doc_BT[b, t] == k_doc_BS[b, s])


def _listed_by(pattern: Pattern, slots: Slots, B: int, T: int, S: int, device: torch.device) -> Listed:
    """List the visible blocks from the keys that the pattern may allow to each row of blocks, without T x S entries."""
    seen = _seen(pattern, slots, B, T, S, device)
    count_BNM = torch.zeros(B, -(-T // BLOCK), -(-S // BLOCK), dtype=torch.int64, device=device)
    b = torch.arange(B, device=device)[:, None, None]
    for n, start in enumerate(range(0, T, BLOCK)):
        stop = min(start + BLOCK, T)
        lo, hi = seen_slots(pattern, slots.starts, start, stop, T, S)
        if hi <= lo:
            continue
        first, last = lo // BLOCK, -(-hi // BLOCK)
        t = torch.arange(start, stop, device=device)[:, None]
        s = torch.arange(first * BLOCK, min(last * BLOCK, S), device=device)
        count_BS = seen(b, torch.zeros_like(b), t, s).expand(B, len(t), len(s)).sum(1)
        count_BNM[:, n, first:last] = F.pad(count_BS, (0, -len(s) % BLOCK)).unflatten(1, (-1, BLOCK)).sum(-1)
    count_BHNM = count_BNM[:, None]
    whole = count_BHNM == BLOCK * BLOCK
    return *_listed((count_BHNM > 0) & ~whole), *_listed(whole)


def _listed(some_BHNM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True blocks in each row, and the order that puts them first."""
    order = some_BHNM.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return some_BHNM.sum(-1).to(torch.int32), order.to(torch.int32)
