"""Attention with a transformers model's own queries, keys and values over the patterns of a mechanism without
parameters.

Options define the patterns; our mask function tells where queries and keys stand. transformers makes one mask for all
layers and passes 4-dimensional tensors through unchanged. Ours holds integers `[B, 1, 1, 1 + S]`: the number of key
slots before the first query, then, for each of the S key slots, 1 for a real token and 0 for padding or an unfilled
slot of a static cache. It is linear in S where a mask would take T S.

Shape letters: B batch, H query heads, G key heads, T queries, S key slots, K channels of a head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from subquad.attention import build, names
from subquad.config import suggest
from subquad.ops import block_attention_with_lse, merge_attention
from subquad.ops.patterns import Pattern

OPTIONS: dict[str, tuple[str, ...]] = {
    "bigbird": ("block", "back", "num_global", "num_random", "seed"),
    "dilated": ("width", "dilation"),
    "full": (),
    "llp": ("segment", "shifted_heads"),
    "longformer": ("width", "num_global"),
    "shifted": ("group",),
    "strided": ("stride", "kind", "columns"),
    "window": ("width",),
}
"""Mechanisms without parameters, and those of their options that add none."""

MOST = {"num_random": 1024, "seed": 2**32 - 1}
"""Largest option values that a file may set, if not 2**31 - 1; each random block is one pattern."""


class Part(NamedTuple):
    """Neighbouring query heads with the same attention, over the union of disjoint `patterns`."""

    heads: int
    patterns: tuple[Pattern, ...]


def check_mechanism(name: str) -> None:
    """Raise `ValueError` if the mechanism `name` needs more than a model's own queries, keys and values."""
    if name in OPTIONS:
        return
    if name in names():
        raise ValueError(
            f"attention {name!r} has parameters, which a transformers model has no place for: convert the model with "
            f"`subquad convert`, or choose one of {', '.join(OPTIONS)}"
        )
    raise ValueError(f"unknown attention {name!r}; {suggest(name, OPTIONS)}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an option that the implementation `name` does not have."""
    for option in options:
        if option not in OPTIONS[name]:
            raise ValueError(
                f"attention {name!r} has no option {option!r} as an attention implementation; "
                f"valid: {', '.join(OPTIONS[name]) or 'none'}"
            )


def parts_of(name: str, num_heads: int, options: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the patterns of `num_heads` query heads in order; `ValueError` or `TypeError` for unsupported options."""
    check_mechanism(name)
    check_options(name, options)
    for option, value in options.items():
        if not isinstance(value, int | str):
            raise TypeError(f"option {option!r} of {name!r} must be an integer, a bool or a string, got {value!r}")
        most = MOST.get(option, 2**31 - 1)
        if isinstance(value, int) and value > most:
            raise ValueError(f"option {option!r} of {name!r} must be at most {most:,}, got {value:,}")
    # Types are part of the cache's key, since True == 1.
    return _parts(name, num_heads, tuple((option, value, type(value)) for option, value in options.items()))


@functools.lru_cache(maxsize=64)
def _parts(name: str, num_heads: int, options: tuple[tuple[str, int | str, type], ...]) -> tuple[Part, ...]:
    values: dict[str, Any] = {option: value for option, value, _ in options}
    with torch.device("meta"):  # only its patterns are needed
        layer = build(name, dim=2 * num_heads, num_heads=num_heads, **values)
    sight: Any = layer.sight
    return tuple(Part(heads, union) for heads, union in sight.patterns_per_head_group(num_heads))


class KeyLayout(NamedTuple):
    """Positions of keys and queries: `before` key slots, then those of the T queries; later slots are empty."""

    before: int
    real_BS: Tensor | None
    """Which of the `before + T` slots hold a real token; None: all."""


def mask_with_offset(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Return this module's mask, on the CPU, to `AttentionMaskInterface`; `ValueError` unless causal with padding."""
    if local_size is not None:
        raise ValueError(
            f"subquad attention replaces the model's pattern: a sliding or chunked layer (of {local_size} tokens) has "
            "one of its own; set every layer of the configuration to full attention (sliding_window=None) first"
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            "subquad attention takes plain causal attention with padding: not packed documents (position_ids that "
            "start again), nor bidirectional attention, nor mask functions added by the model or the caller"
        )
    before, stop = int(q_offset), int(q_offset) + q_length
    if kv_offset != 0 or stop > kv_length:
        raise ValueError(
            f"subquad attention needs a cache that keeps every key from the first one, got keys from {kv_offset} on, "
            f"{kv_length} of them, for queries {before} to {stop - 1}"
        )
    layout = torch.zeros(batch_size, 1, 1, 1 + kv_length, dtype=torch.int32)
    layout[..., 0] = before
    layout[..., 1 : 1 + stop] = 1
    if attention_mask is not None:
        if attention_mask.ndim != 2 or not stop <= attention_mask.shape[1]:
            raise ValueError(
                f"attention_mask must have a column for each token so far, [{batch_size}, {stop}], "
                f"got {list(attention_mask.shape)}"
            )
        layout[:, 0, 0, 1 : 1 + stop] = (attention_mask[:, :stop] != 0).to(layout)
    return layout


def read_layout(mask: Tensor | None, batch: int, queries: int, keys: int) -> KeyLayout:
    """Read a mask of `mask_with_offset` (None: queries and keys are the same tokens); `ValueError` for another."""
    if mask is None:
        if queries != keys:
            raise ValueError(
                f"subquad attention was given {queries} queries, {keys} keys and no mask that says where they stand: "
                "the model must make its masks through transformers' AttentionMaskInterface"
            )
        return KeyLayout(0, None)
    if mask.dtype != torch.int32 or mask.shape not in ((batch, 1, 1, 1 + keys), (1, 1, 1, 1 + keys)):
        raise ValueError(
            "subquad attention does not support 4-D masks: give a 2-D attention_mask of padding, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    before = int(mask[0, 0, 0, 0])
    real_BS = mask[:, 0, 0, 1 : 1 + before + queries] != 0
    return KeyLayout(before, None if bool(real_BS.all()) else real_BS.expand(batch, -1))


def attend_over(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    parts: Sequence[Part],
    layout: KeyLayout,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Return `y_t = sum_s softmax_s(scale q_t . k_s) v_s` over the keys s that t's head may see, `[B, H, T, K]`.

    Positions count a row's real tokens; outputs at padding are zero.
    """
    T, S = q_BHTK.shape[2], layout.before + q_BHTK.shape[2]
    # Skip the key slots that not even the first query reaches; padding, if any, moves before the real tokens below.
    drop = max(0, S - T - _reach(parts)) if T < S else 0
    q_start: int | Tensor = layout.before
    k_start: int | Tensor = drop
    mask_BT = back_BT = None
    real_BS = None if layout.real_BS is None else layout.real_BS.to(q_BHTK.device)
    if real_BS is not None and T < S:
        lengths_B = real_BS.sum(-1)
        q_start, k_start = lengths_B - T, lengths_B - S + drop
        q_order_BT, k_order_BS = (x.byte().argsort(dim=-1, stable=True) for x in (real_BS[:, S - T :], real_BS))
        q_BHTK, back_BT = _taken(q_BHTK, q_order_BT), q_order_BT.argsort(dim=-1)
        k_BGSK, v_BGSK = (_taken(x, k_order_BS[:, drop:]) for x in (k_BGSK, v_BGSK))
    else:
        mask_BT = real_BS
        k_BGSK, v_BGSK = k_BGSK[:, :, drop:S], v_BGSK[:, :, drop:S]
    if len(parts) > 1:
        shared = q_BHTK.shape[1] // k_BGSK.shape[1]
        k_BGSK, v_BGSK = (x.repeat_interleave(shared, 1) for x in (k_BGSK, v_BGSK))
    heads = [part.heads for part in parts]
    places: dict[str, Any] = {
        "q_start": q_start,
        "k_start": k_start,
        "mask": mask_BT,
        "scale": scale,
        "dropout_p": dropout_p,
    }
    split = [(q_BHTK, k_BGSK, v_BGSK)]
    if len(parts) > 1:
        split = list(zip(*(x.split(heads, 1) for x in (q_BHTK, k_BGSK, v_BGSK)), strict=True))
    outs = [_union(*qkv, part.patterns, **places) for qkv, part in zip(split, parts, strict=True)]
    out_BHTK = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    if back_BT is not None and real_BS is not None:
        out_BHTK = _taken(out_BHTK, back_BT).masked_fill(~real_BS[:, None, S - T :, None], 0.0)
    return out_BHTK


def _reach(parts: Sequence[Part]) -> int:
    """Return how many tokens before itself a query sees at most."""
    reaches = [pattern.reach for part in parts for pattern in part.patterns]
    return max(sys.maxsize if reach is None else reach for reach in reaches)


def _union(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: Sequence[Pattern], **places: Any) -> Tensor:
    """Compute softmax attention over the union of disjoint patterns."""
    parts = [block_attention_with_lse(q_BHTK, k_BGSK, v_BGSK, pattern, **places) for pattern in patterns]
    outs, lses = zip(*parts, strict=True)
    return outs[0] if len(outs) == 1 else merge_attention(outs, lses)[0]


def _taken(x_BHSK: Tensor, order_BS: Tensor) -> Tensor:
    return x_BHSK.gather(2, order_BS[:, None, :, None].expand(*x_BHSK.shape[:2], -1, x_BHSK.shape[3]))
