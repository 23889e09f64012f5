"""What our mask function hands to our attention in place of a mask: where a row's real tokens stand among the keys.

transformers makes one mask for all layers and passes on tensors of 4 dimensions as they are. Ours holds whole numbers
`[B, 1, 1, 1 + S]`: the number of key slots before the first query, then 1 for each of the S key slots that holds a real
token and 0 for padding and for what a static cache has not filled. It is linear in S where a mask would be T S.

Shape letters: B batch, T queries, S key slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function


class Standing(NamedTuple):
    """Where queries and keys stand: `before` key slots, then those of the T queries; slots after them are empty."""

    before: int
    real_BS: Tensor | None
    """Which of the `before + T` slots hold a real token; None: all."""


def standing_mask(
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
    """The `[B, 1, 1, 1 + S]` of this module, on the CPU, as transformers' `AttentionMaskInterface` calls for it.

    Raises `ValueError` for masks that are not plain causal attention with padding.
    """
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
    standing = torch.zeros(batch_size, 1, 1, 1 + kv_length, dtype=torch.int32)
    standing[..., 0] = before
    standing[..., 1 : 1 + stop] = 1
    if attention_mask is not None:
        if attention_mask.ndim != 2 or not stop <= attention_mask.shape[1]:
            raise ValueError(
                f"attention_mask must tell for each token so far whether it is real, [{batch_size}, {stop}], "
                f"got {tuple(attention_mask.shape)}"
            )
        standing[:, 0, 0, 1 : 1 + stop] = (attention_mask[:, :stop] != 0).to(standing)
    return standing


def read_standing(mask: Tensor | None, batch: int, queries: int, keys: int) -> Standing:
    """What `standing_mask` wrote; without any mask the queries are all the keys there are.

    Raises `ValueError` for a mask that is not ours.
    """
    if mask is None:
        if queries != keys:
            raise ValueError(
                f"subquad attention was given {queries} queries, {keys} keys and no mask that says where they stand: "
                "the model must make its masks through transformers' AttentionMaskInterface"
            )
        return Standing(0, None)
    if mask.dtype != torch.int32 or mask.shape not in ((batch, 1, 1, 1 + keys), (1, 1, 1, 1 + keys)):
        raise ValueError(
            "subquad attention takes no 4-D masks of its caller: give a 2-D attention_mask of padding, "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    before = int(mask[0, 0, 0, 0])
    real_BS = mask[:, 0, 0, 1 : 1 + before + queries] != 0
    return Standing(before, None if bool(real_BS.all()) else real_BS.expand(batch, -1))
