"""What the inputs of a causal language model say of padding, positions and packed documents.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.models.decoder import IGNORED


def padding_mask(attention_mask: Tensor | None, tokens_BT: Tensor) -> Tensor | None:
    """Bool `[B, T]` of the tokens at hand, or None where all are real (one look at the data, not when compiled)."""
    if attention_mask is None:
        return None
    B, T = tokens_BT.shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask must have shape [{B}, {T}], or more columns for tokens in the cache, "
            f"got {list(attention_mask.shape)}"
        )
    mask_BT = attention_mask[:, attention_mask.shape[1] - T :] != 0
    if not torch.compiler.is_compiling() and bool(mask_BT.all()):
        return None
    return mask_BT


def check_positions(position_ids: Tensor | None, tokens_BT: Tensor, mask_BT: Tensor | None, seen: int | Tensor) -> None:
    """Raise `ValueError` where a real token's position isn't the number of real tokens before it in its row."""
    if position_ids is None or torch.compiler.is_compiling():
        return
    T = tokens_BT.shape[1]
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, tokens_BT.shape[0]) or position_ids.shape[1] != T:
        raise ValueError(f"position_ids must have shape {list(tokens_BT.shape)}, got {list(position_ids.shape)}")
    real_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if mask_BT is None else mask_BT
    start_B = torch.as_tensor(seen, device=tokens_BT.device).expand(tokens_BT.shape[0])
    counted_BT = start_B[:, None] + real_BT.cumsum(1) - 1
    if bool(((position_ids != counted_BT) & real_BT).any()):
        raise ValueError(
            "position_ids other than the count of the row's real tokens are not supported, but for packed documents "
            "without attention_mask, each counted from 0: leave position_ids out, and name padding by attention_mask"
        )


def packed_documents(
    doc_ids: Tensor | None, position_ids: Tensor | None, attention_mask: Tensor | None, tokens_BT: Tensor
) -> Tensor | None:
    """The documents `[B, T]` of packed rows: those given, or one for each time that the positions begin again at 0.

    None where nothing is packed. Raises `ValueError` for positions that say something else than `doc_ids`.
    """
    if position_ids is None or torch.compiler.is_compiling():
        return doc_ids
    if doc_ids is not None:
        raise ValueError("doc_ids set the positions, each document's from 0: leave position_ids out")
    if attention_mask is not None or position_ids.ndim != 2 or position_ids.shape[1] != tokens_BT.shape[1]:
        return None
    begins_PT = position_ids == 0
    if not bool(begins_PT[:, 1:].any()) or position_ids.shape[0] not in (1, tokens_BT.shape[0]):
        return None
    steps_PT = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if not bool(begins_PT[:, :1].all() & (steps_PT | begins_PT[:, 1:]).all()):
        return None  # no packed documents: `check_positions` says what is wrong
    return begins_PT.cumsum(1).expand(tokens_BT.shape)


def check_counted(labels_BT: Tensor, target_BT: Tensor, mask_BT: Tensor | None, doc_ids: Tensor | None) -> None:
    """Raise `ValueError` for labels that the Trainer counts and that are not among the targets: those at padding, and
    those at the first token of a document.
    """
    if mask_BT is not None and bool((labels_BT[~mask_BT] != IGNORED).any()):
        raise ValueError(
            "num_items_in_batch counts labels at padding, which the loss leaves out: set labels to -100 where "
            "attention_mask is 0, as the collators of transformers do"
        )
    if doc_ids is not None and int((labels_BT[:, 1:] != IGNORED).sum()) != int((target_BT != IGNORED).sum()):
        raise ValueError(
            "num_items_in_batch counts labels at the first tokens of documents or at padding, which the loss leaves "
            "out: set them to -100, as DataCollatorWithFlattening does"
        )
