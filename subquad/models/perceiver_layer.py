"""A layer of Perceiver AR: latents attend to a history and to one another, and the history may attend to itself.

Shape letters: B batch, S history or keys, M latents, D model width, H heads, K channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.attention.base import join, split
from subquad.attention.divided import check_divided, check_even
from subquad.attention.full import Full
from subquad.attention.parts import keys, queries
from subquad.models.blocks import Block
from subquad.models.matrices import WeightMatrix
from subquad.models.perceiver_window import History, Number
from subquad.ops import block_attention
from subquad.ops.patterns import Causal, Pattern

Kept = tuple[Tensor, Tensor]
"""Keys and values `[B, H, S, K]`, the history's first."""


class Attended(NamedTuple):
    """The output of a `LatentAttention`, its queries, and all keys and values that they read."""

    y_BMD: Tensor
    q_BHMK: Tensor
    k_BHSK: Tensor
    v_BHSK: Tensor


class LatentAttention(Full):
    """Full attention whose caller gives the positions of the vectors and the keys that they read before themselves.

    Its signature differs from a mechanism's, since a history need not end where the latents begin: it may be
    compressed, with tokens dropped, or of another length in each row.
    """

    def forward(  # type: ignore[override]
        self,
        z_BMD: Tensor,
        places: Number,
        pattern: Pattern,
        *,
        q_start: Number = 0,
        k_start: Number = 0,
        history: tuple[Tensor, Number] | None = None,
        kept: Kept | None = None,
    ) -> Attended:
        """Attend from vectors at `places` to a history (its vectors and places) or to `kept` keys, and to themselves.

        `pattern` counts slots: the first query is at `q_start`, the first key at `k_start`; negative slots are empty.
        """
        check_divided(self)
        channels = self.config.channels
        q_BHMK, k_BHSK, v_BHSK = split(channels, self.query(z_BMD), self.key(z_BMD), self.value(z_BMD))
        check_even(self, q_BHMK, k_BHSK, self.config.query_share)
        q_BHMK, k_BHSK = at_places(queries, self, q_BHMK, places), at_places(keys, self, k_BHSK, places)
        if history is not None:
            before_k, before_v = split(channels, self.key(history[0]), self.value(history[0]))
            kept = at_places(keys, self, before_k, history[1]), before_v
        if kept is not None:
            k_BHSK = torch.cat([kept[0].to(k_BHSK.dtype), k_BHSK], 2)
            v_BHSK = torch.cat([kept[1].to(v_BHSK.dtype), v_BHSK], 2)
        y_BHMK = block_attention(
            q_BHMK, k_BHSK, v_BHSK, pattern, q_start=q_start, k_start=k_start, dropout_p=self.dropout_p
        )
        return Attended(self.out(join(y_BHMK)), q_BHMK, k_BHSK, v_BHSK)

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]


class LatentBlock(Block):
    """A block whose attention is a `LatentAttention`."""

    attention: LatentAttention

    def forward(  # type: ignore[override]
        self,
        x_BMD: Tensor,
        start: Number,
        past: History | None = None,
        *,
        update: LatentAttention | None = None,
        pattern: Pattern | None = None,
        kept: Kept | None = None,
        count: Number = 0,
    ) -> tuple[Tensor, Kept, History | None]:
        """Return the latents, the first at position `start`, after the block, its keys and values, and the history.

        The latents read the history `past`, or the last `count` of the `kept` keys. `update` attends from the history
        to itself within `pattern`; without it the history returned is None.
        """
        z_BMD, after = self.attention_input(x_BMD), None
        if past is None:
            k_start = 0 if kept is None else count - kept[0].shape[2]
            found = self.attention(z_BMD, start, Causal(), q_start=count, k_start=k_start, kept=kept)
        else:
            z_BSD, first = self.attention_input(past.x_BSD), -past.empty
            if update is not None:
                own = update(z_BSD, past.places, pattern, q_start=first, k_start=first)  # type: ignore[arg-type]  # given with update
                after = past._replace(x_BSD=self.residual_and_feedforward(past.x_BSD, own.y_BMD))
            history, q_start = (z_BSD, past.places), z_BSD.shape[1] + first
            found = self.attention(z_BMD, start, Causal(), q_start=q_start, k_start=first, history=history)
        return self.residual_and_feedforward(x_BMD, found.y_BMD), (found.k_BHSK, found.v_BHSK), after

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]


def at_places(
    turn: Callable[[Any, Tensor, Number], Tensor], layer: LatentAttention, x_BHSK: Tensor, places: Number
) -> Tensor:
    """Return projected queries or keys, rotated to the positions `places`, which need not be consecutive."""
    if isinstance(places, int) or places.ndim == 1:
        return turn(layer, x_BHSK, places)
    x_BSHK = x_BHSK.transpose(1, 2)
    alone = turn(layer, x_BSHK.flatten(0, 1)[:, :, None], places.reshape(-1))  # [B * S, H, 1, K]
    return alone.reshape(x_BSHK.shape).transpose(1, 2)


def draw(
    drawn: list[WeightMatrix], layer: int, name: str, module: nn.Module, args: Any, kwargs: Any, found: Attended
) -> None:
    """Add the weights of one sequence, a forward hook of a `LatentAttention`: its outputs for values that are rows of
    the identity."""
    (z_BMD, places, pattern), k_BHSK = args, found.k_BHSK
    names = _slot_names(places, z_BMD.shape[1])
    if (history := kwargs.get("history")) is not None:
        names = _slot_names(history[1], history[0].shape[1]) + names
    eye_SS = torch.eye(k_BHSK.shape[2], dtype=k_BHSK.dtype, device=k_BHSK.device).expand(*k_BHSK.shape[:3], -1)
    w_HTS = block_attention(found.q_BHMK, k_BHSK, eye_SS, pattern, q_start=kwargs["q_start"])[0]
    drawn.append(WeightMatrix(layer, name, w_HTS, name == "latents", names))


def _slot_names(places: Number, slots: int) -> list[str]:
    """Return the position of each token as text, or the number of each row of a compressed history."""
    return [str(places + s) if isinstance(places, int) else f"row {s}" for s in range(slots)]
