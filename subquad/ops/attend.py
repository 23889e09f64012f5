"""Engine B, block attention: softmax over the keys that a pattern allows.

Shape letters: B batch, H query heads, T queries, S keys, K key channels, V value channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.ops import _reference as reference
from subquad.ops._sequential import attend as sequential
from subquad.ops._torch import attend as tiled
from subquad.ops.backends import BACKENDS, HAS_TRITON, choose, has_tensor_cores, without_autocast
from subquad.ops.counting import report_scores
from subquad.ops.padding import check_heads, check_mask, compaction, real_slots
from subquad.ops.patterns import Pattern
from subquad.ops.precision import at_least_float32
from subquad.ops.slots import Slots, Starts, allowed_pairs, nothing, placed, placed_apart
from subquad.tracing import recorded

Where = tuple[int | Tensor, int | Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q_start, k_start, lengths, key_lengths, mask and doc_ids of `block_attention`."""
Options = tuple[float | None, float, tuple[int, int] | None, str | None]
"""scale, dropout_p, chunk_size and backend of `block_attention`."""


@without_autocast
def block_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    pattern: Pattern,
    /,
    *,
    q_start: int | Tensor = 0,
    k_start: int | Tensor = 0,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    chunk_size: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Tensor:
    """`o_t = sum_s softmax_s(scale q_t . k_s) v_s` over the keys s that `pattern` allows to query t.

    Args:
        q_BHTK: queries `[B, H, T, K]`.
        k_BHSK: keys `[B, G, S, K]`; G divides H, and H / G neighbouring query heads share a key head.
        v_BHSV: values `[B, G, S, V]`.
        pattern: which keys a query may see, by position.
        q_start: position of the first query: an int, or an int64 `[B]` if rows differ.
        k_start: position of the first key slot, in the same form; slots at negative positions hold no key. If a start
            is a tensor, the queries must be the last T of the S key slots.
        lengths: `[B]`, number of leading key slots of each row that are real. The queries are the last T of the S key
            slots; queries beyond `lengths` give zeros.
        key_lengths: `[B]`, the same for cross-attention, where queries are not among the keys and all are real. Needs a
            non-causal pattern and integer starts.
        mask: bool `[B, T]` with T = S, True for a real token. Padding may stand anywhere, takes no position and gives
            zeros.
        doc_ids: int `[B, S]`: a query sees only keys of its own document. The queries are the last T of the S slots.
        scale: factor on the scores; default 1 / sqrt(K).
        dropout_p: dropout probability of the weights.
        chunk_size: queries and keys per step of the backend `sequential` (default 1024 and 4096); changes only the
            order of summation.
        backend: `reference` (dense, the definition), `torch` (tiles; linear memory, except for dropout on unbounded
            patterns), `sequential` (one chunk of queries and keys at a time, in the memory of one tile of scores),
            `triton` (kernels for patterns with one range of keys per query and at most 512 channels per head), `flex`
            (FlexAttention), or None: on a GPU `triton` if it supports the pattern, else `flex` in training, where
            shapes repeat and compilation pays off; `torch` on a CPU, on a GPU below compute capability 8.0, with
            dropout, in float64, and for patterns that it folds into dense ones. An explicit request never falls back:
            `triton` and `flex` reject dropout and float64.

    Returns `[B, H, T, V]` in the dtype of the values; scores are computed in float32 or wider. A query that sees no key
    gives zeros. Raises `ValueError` and `TypeError` for invalid shapes and options.
    """
    where = q_start, k_start, lengths, key_lengths, mask, doc_ids
    options = scale, dropout_p, chunk_size, backend
    return _attention(q_BHTK, k_BHSK, v_BHSV, pattern, where, options, with_lse=False)[0]


@without_autocast
def block_attention_with_lse(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    pattern: Pattern,
    /,
    *,
    q_start: int | Tensor = 0,
    k_start: int | Tensor = 0,
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    mask: Tensor | None = None,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    chunk_size: tuple[int, int] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `block_attention` and the logsumexp `[B, H, T]` of each query's scores.

    The logsumexp is differentiable, float32 or wider, and -inf for a query that sees no key; see `merge_attention`.
    Arguments and errors are those of `block_attention`.
    """
    where = q_start, k_start, lengths, key_lengths, mask, doc_ids
    options = scale, dropout_p, chunk_size, backend
    return _attention(q_BHTK, k_BHSK, v_BHSV, pattern, where, options, with_lse=True)


def _attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, where: Where, options: Options, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return outputs and logsumexp; without `with_lse` a backend may save work and return a logsumexp of NaN."""
    q_start, k_start, lengths, key_lengths, mask, doc_ids = where
    scale, dropout_p, chunk_size, backend = options
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern must be a Pattern, got {type(pattern).__name__}; valid: {', '.join(Pattern.registry)}"
        )
    if not (
        q_BHTK.ndim == k_BHSK.ndim == v_BHSV.ndim == 4
        and q_BHTK.shape[::3] == k_BHSK.shape[::3]
        and k_BHSK.shape[:3] == v_BHSV.shape[:3]
        and (k_BHSK.shape[1] >= 1 and q_BHTK.shape[1] % k_BHSK.shape[1] == 0)
        and (q_BHTK.is_floating_point() and k_BHSK.is_floating_point() and v_BHSV.is_floating_point())
    ):
        _refuse(q_BHTK, k_BHSK, v_BHSV)
    (B, H, T, K), S = q_BHTK.shape, k_BHSK.shape[2]
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    qkv = q_BHTK, k_BHSK, v_BHSV
    default = _default_on_gpu(*qkv, pattern, dropout_p) if q_BHTK.device.type == "cuda" else "torch"
    name = choose("block_attention", backend, BACKENDS, default, qkv)
    chunks = (sequential.QUERY_CHUNK, sequential.KEY_CHUNK) if chunk_size is None else _chunks(chunk_size, name)
    dtype = v_BHSV.dtype
    moved = None
    if mask is not None:
        if T != S or lengths is not None or doc_ids is not None:
            raise ValueError(
                f"mask needs as many queries as keys, and neither lengths nor doc_ids, got T={T}, S={S}, "
                f"lengths={lengths is not None}, doc_ids={doc_ids is not None}"
            )
        check_mask(mask, B, T)
        moved = compaction(mask)
        q_BHTK, k_BHSK, v_BHSV = (_take(x, moved.order_BT, moved.lengths_B) for x in (q_BHTK, k_BHSK, v_BHSV))
        lengths = moved.lengths_B
    slots: Slots | Starts
    if key_lengths is not None:
        others = lengths is not None or mask is not None or doc_ids is not None
        apart, real_BT = placed_apart(q_start, k_start, key_lengths, others, pattern, B), None
        slots = Starts(*apart[:3]) if name == "triton" else apart
    else:
        given = q_start, k_start, lengths, doc_ids, pattern, q_BHTK, S
        slots, real_BT = placed(*given, for_kernels=name == "triton")
    scale = 1 / math.sqrt(K) if scale is None else scale
    report_scores(B * H, T, S, pattern, q_start, k_start)
    if T == 0 or S == 0:
        out, lse = nothing(at_least_float32(q_BHTK), v_BHSV)
    else:
        wide = functools.reduce(torch.promote_types, (q_BHTK.dtype, k_BHSK.dtype, dtype))
        if name not in ("triton", "flex"):
            wide = torch.promote_types(wide, torch.float32)
        elif dropout_p:
            raise ValueError(
                f"backend {name!r} of block_attention has no dropout, got dropout_p={dropout_p}; "
                "valid: reference, torch, sequential"
            )
        q, k, v = q_BHTK.to(wide), k_BHSK.to(wide), v_BHSV.to(wide)
        if k.shape[1] != H and name not in ("triton", "flex"):  # these take shared key heads
            k, v = _share_heads(k, H), _share_heads(v, H)
        if isinstance(slots, Starts):
            from subquad.ops._triton import attend as kernels

            out, lse = kernels.attend(q, k, v, pattern, slots, scale)
        elif name == "flex":
            from subquad.ops import _flex as flex

            out, lse = flex.attend(q, k, v, pattern, slots, scale, with_lse)
        elif name == "reference":
            out, lse = reference.attend(q, k, v, allowed_pairs(pattern, slots, T, S, q.device), scale, dropout_p)
        elif name == "sequential":
            out, lse = sequential.attend(q, k, v, pattern, slots, scale, dropout_p, chunks)
        else:
            out, lse = tiled.attend(q, k, v, pattern, slots, scale, dropout_p)
    if real_BT is not None:
        out = out.masked_fill(~real_BT[:, None, :, None], 0.0)
        lse = lse.masked_fill(~real_BT[:, None], -torch.inf)
    if moved is not None:
        out = out.gather(2, moved.inverse_BT[:, None, :, None].expand_as(out))
        lse = lse.gather(2, moved.inverse_BT[:, None].expand_as(lse))
    return out.to(dtype), lse


def _default_on_gpu(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, dropout_p: float) -> str:
    """Return the default backend of tensors on a GPU."""
    channels, dtypes = max(q.shape[-1], v.shape[-1]), (q.dtype, k.dtype, v.dtype)
    if dropout_p or torch.float64 in dtypes or not has_tensor_cores(q.device):
        return "torch"
    if HAS_TRITON:
        from subquad.ops._triton.attend import most_channels, supports

        if supports(pattern) and channels <= most_channels(max(dtype.itemsize for dtype in dtypes), q.device):
            return "triton"
    flex = recorded(q, k, v) and channels <= 256 and not pattern.folded and not pattern.columns
    return "flex" if flex else "torch"


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor], /) -> tuple[Tensor, Tensor]:
    """Softmax over a union of disjoint sets of keys: `o = sum_i exp(lse_i - lse) o_i`, `lse = log sum_i exp(lse_i)`.

    Args:
        outs: outputs `[B, H, T, V]` of the sets, as `block_attention_with_lse` gives them.
        lses: the logsumexp `[B, H, T]` of each set's scores; -inf if a query sees no key of the set.

    Returns the output in the dtype of `outs[0]` and the logsumexp of the union. Raises `ValueError` if `outs` is empty
    or `lses` has another length.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_attention needs one lse for each of one or more outs, got {len(lses)} and {len(outs)}")
    lse_NBHT = torch.stack(list(lses))
    # Softmax over nothing but -inf is NaN. With a finite floor a query without keys averages zeros, with no gradient.
    empty_NBHT = torch.isneginf(lse_NBHT)
    lse_NBHT = lse_NBHT.masked_fill(empty_NBHT, torch.finfo(lse_NBHT.dtype).min)
    shares_NBHT = lse_NBHT.softmax(0)
    out_BHTV = torch.stack([out * share[..., None] for out, share in zip(outs, shares_NBHT, strict=True)]).sum(0)
    return out_BHTV.to(outs[0].dtype), lse_NBHT.logsumexp(0).masked_fill(empty_NBHT.all(0), -torch.inf)


def softmax_weights(
    q_BHTK: Tensor, k_BHSK: Tensor, /, *patterns: Pattern, scale: float | None = None, sink_H: Tensor | None = None
) -> Tensor:
    """Return the dense weights `[B, H, T, S]`, the definition; queries and keys both begin at position 0.

    A query sees every key that any of the patterns allows; a `sink` joins its softmax as the score of one more.
    """
    T, S = q_BHTK.shape[2], k_BHSK.shape[2]
    each = [allowed_pairs(pattern, Slots(0, 0), T, S, q_BHTK.device) for pattern in patterns]
    k_BHSK = _share_heads(k_BHSK, q_BHTK.shape[1])
    scale = 1 / math.sqrt(q_BHTK.shape[-1]) if scale is None else scale
    return reference.softmax_weights(q_BHTK, k_BHSK, torch.stack(each).any(0), scale, sink_H)[0]


def _chunks(chunk_size: tuple[int, int], backend: str) -> tuple[int, int]:
    if backend != "sequential":
        raise ValueError(f"chunk_size is for the backend 'sequential', got chunk_size={chunk_size} for {backend!r}")
    if len(chunk_size) != 2 or min(chunk_size) < 1:
        raise ValueError(f"chunk_size must be two numbers of at least 1 (queries, keys), got {chunk_size}")
    return chunk_size


def _refuse(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise the error of queries, keys and values that do not agree."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_heads(name, x)
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q [B, H, T, K], k [B, G, S, K] and v [B, G, S, V] must agree in B, K, G and S, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    raise ValueError(f"the query heads must be a multiple of the key heads, got {q.shape[1]} and {k.shape[1]}")


def _take(x_BHTC: Tensor, order_BT: Tensor, lengths_B: Tensor) -> Tensor:
    x_BHTC = x_BHTC.gather(2, order_BT[:, None, :, None].expand_as(x_BHTC))
    return x_BHTC.masked_fill(~real_slots(lengths_B, x_BHTC.shape[2])[:, None, :, None], 0.0)


def _share_heads(x_BGSK: Tensor, heads: int) -> Tensor:
    return x_BGSK if x_BGSK.shape[1] == heads else x_BGSK.repeat_interleave(heads // x_BGSK.shape[1], 1)
