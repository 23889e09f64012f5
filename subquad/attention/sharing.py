"""Checks of a layer's arguments where several processes share a sequence (`subquad.parallel`)."""

from __future__ import annotations

from typing import Any


def check_shared(layer: Any) -> None:
    """Raise `ValueError` if a layer can't read a shared sequence."""
    if not layer.causal:
        raise ValueError(
            f"this {layer.name} layer is not causal: it reads whole sequences, which several processes cannot share"
        )


def check_part(layer: Any, state: object, padding: object, doc_ids: object) -> None:
    """Raise `ValueError` for arguments that a layer can't take in an active group."""
    check_shared(layer)
    check_whole(state, padding, doc_ids)
    check_dropout(layer.dropout_p)


def check_whole(state: object, padding: object, doc_ids: object) -> None:
    """Raise `ValueError` for a state, padding or documents together with a shared sequence."""
    if state is not None:
        raise ValueError(
            "a sequence that several processes share is read from its first token: it takes no state; "
            "leave `context_parallel` to go on from one"
        )
    if doc_ids is not None:
        raise ValueError(
            "a sequence that several processes share is one document: leave doc_ids out, or leave `context_parallel`"
        )
    if padding is not None:
        raise ValueError(
            "a sequence that several processes share has no padding: positions would depend on other ranks' tokens; "
            "cut off the padding and leave the mask out"
        )


def check_dropout(dropout: float) -> None:
    """Raise `ValueError` if dropout is on."""
    if dropout:
        raise ValueError(
            f"dropout={dropout} draws other numbers on several processes than on one: set it to 0, or leave "
            "`context_parallel`"
        )
