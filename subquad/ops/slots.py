"""Where the tokens of queries and keys stand: what engine B hands to each of its backends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """Where the tokens of queries and keys stand.

    `q_pos_BT`, `k_pos_BS`: positions by row, negative for an empty slot; None: counted from `q_start` and `k_start`.
    `lengths_B`: how many of a row's key slots hold a token, where later ones could be seen.
    `q_doc_BT`, `k_doc_BS`: a query sees keys of its own document only; given with positions alone.
    """

    q_start: int
    k_start: int
    lengths_B: Tensor | None = None
    q_pos_BT: Tensor | None = None
    k_pos_BS: Tensor | None = None
    q_doc_BT: Tensor | None = None
    k_doc_BS: Tensor | None = None
