"""A mechanism on packed documents: each is a sequence of its own, which no other one sees.

Shape letters: B batch, T tokens, D model width, R documents of a group, C slots of each, L vectors of a memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from subquad.ops.documents import Documents, Group, lay_out
from subquad.ops.padding import check_mask
from subquad.state import State

if TYPE_CHECKING:
    from subquad.attention.base import Attention


def mix_packed(
    layer: Attention,
    x_BTD: Tensor,
    state: State | None,
    mask: Tensor | None,
    doc_ids: Tensor,
    memory: Tensor | None = None,
) -> tuple[Tensor, State, Tensor | None]:
    """`Attention.forward` with `doc_ids`, and the memory that a layer with one hands on."""
    check_fresh(state)
    return mix_documents(layer, x_BTD, lay_out(doc_ids, mask, *x_BTD.shape[:2]), memory)


def check_fresh(state: State | None) -> None:
    """Raise `ValueError` for a state: packed documents begin anew."""
    if state is not None:
        raise ValueError("doc_ids begin new documents, and these have no state before them: leave state or doc_ids out")


def mix_documents(
    layer: Attention, x_BTD: Tensor, documents: Documents, memory: Tensor | None
) -> tuple[Tensor, State, Tensor | None]:
    """`Attention.mix` of each document; the state is that of the first group's documents.

    A memory, `[B or 1, L, D]`, is that of all documents of its row. Raises `ValueError` for a layer that hands another
    one on for each sequence.
    """
    outputs: list[Tensor] = []
    first: State | None = None
    mixer: Any = layer
    if layer.hands_memory and not layer.causal:
        raise ValueError(
            f"a bidirectional {layer.name} layer hands on a memory of each sequence and takes no packed documents: "
            "give it one document a row, with a mask"
        )
    for group in documents.groups:
        x_RCD = documents.take(x_BTD, group)
        if layer.hands_memory:
            y_RCD, state, handed = mixer.mix_with_memory(x_RCD, None, group.lengths_R, _of_documents(memory, group))
            memory = handed if memory is None else memory
        else:
            y_RCD, state = layer.mix(x_RCD, None, group.lengths_R)
        outputs.append(y_RCD)
        first = state if first is None else first
    assert first is not None  # there is always a group
    return documents.put(outputs), first, memory


def _of_documents(memory: Tensor | None, group: Group) -> Tensor | None:
    """The memory of each document: its row's."""
    return memory if memory is None or memory.shape[0] == 1 else memory[group.rows_R]


def sequences(mask: Tensor | None, doc_ids: Tensor | None, batch: int, tokens: int) -> Iterator[tuple[int, Tensor]]:
    """The sequences in rows `[batch, tokens]`: the row and the places of the tokens of each."""
    if doc_ids is None:
        assert mask is not None
        check_mask(mask, batch, tokens)
        doc_ids, mask = mask.long() - 1, None
    for group in lay_out(doc_ids, mask, batch, tokens).groups:
        for row, places_C in zip(group.rows_R.tolist(), group.places_RC, strict=True):
            yield row, places_C[places_C < batch * tokens] - row * tokens


def block_diagonal(layer: Attention, x_BTD: Tensor, mask: Tensor | None, doc_ids: Tensor | None) -> Tensor:
    """The weights `[B, H, T, T]` of rows that hold padding, or several documents."""
    B, T = x_BTD.shape[:2]
    w_BHTS = x_BTD.new_zeros(B, layer.weight_heads, T, T)
    for b, real in sequences(mask, doc_ids, B, T):
        w_BHTS[b, :, real[:, None], real] = layer.dense_weights(x_BTD[b : b + 1, real])[0]
    return w_BHTS
