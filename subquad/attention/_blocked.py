"""What every softmax mechanism shares: project, attend over a pattern, keep the keys that are still in reach.

Shape letters: B batch, T tokens, S keys, D model width, H heads, G key heads, K channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.layers.positions import rotate
from subquad.ops import block_attention
from subquad.ops._torch.tiles import static_groups
from subquad.ops.attend import softmax_weights
from subquad.ops.patterns import Pattern
from subquad.state import State, advance


class BlockedAttention(Attention):
    """Softmax attention over the keys that `pattern` allows; the state holds the keys and values still in reach."""

    rotates = True
    pattern: Pattern

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        """Options of a softmax mechanism."""

        num_kv_heads: int | None = None
        """Heads of keys and values; neighbouring query heads share one (None: as many as num_heads)."""
        rope: bool = False
        """Whether queries and keys carry rotary positions."""
        rope_base: float = 10000.0
        """Base of the rotary frequencies."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
                raise ValueError(
                    f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads}, "
                    f"num_heads={self.num_heads}"
                )
            if self.rope and self.dim // self.num_heads % 2:
                raise ValueError(f"rope needs an even head size, got dim / num_heads = {self.dim // self.num_heads}")
            if self.rope_base <= 0:
                raise ValueError(f"rope_base must be positive, got {self.rope_base}")

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kv_heads = config.num_kv_heads or config.num_heads
        self.kv_dim = config.dim // config.num_heads * self.kv_heads
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, self.kv_dim, bias=config.bias)
        self.value = nn.Linear(config.dim, self.kv_dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def mix(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend to the cached keys and the new ones."""
        seen = 0 if state is None else state.seen
        q_BHTK, k_BGTK, v_BGTK = self.queries(x_BTD, seen), self.keys(x_BTD, seen), self.kv_values(x_BTD)
        y_BHTK, k_BGSK, v_BGSK = self.attend(q_BHTK, k_BGTK, v_BGTK, self.pattern, state, "", lengths_B)
        seen = advance(seen, x_BTD.shape[1], lengths_B)
        return self.merge(y_BHTK), State({"seen": seen, "keys": k_BGSK, "values": v_BGSK}, self.config_hash)

    def attend(
        self,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        pattern: Pattern,
        state: State | None,
        prefix: str,
        lengths_B: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, and the keys and values to keep (each row's last ones, aligned to the end)."""
        seen, old = 0 if state is None else state.seen, 0
        if state is not None:
            k_BGTK = torch.cat([state.tensor(f"{prefix}keys").to(k_BGTK.dtype), k_BGTK], 2)
            v_BGTK = torch.cat([state.tensor(f"{prefix}values").to(v_BGTK.dtype), v_BGTK], 2)
            old = k_BGTK.shape[2] - q_BHTK.shape[2]
        lengths_B = None if lengths_B is None else lengths_B + old
        dropout = self.config.dropout if self.training else 0.0
        y_BHTK = block_attention(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            pattern,
            q_start=seen,
            k_start=seen - old,
            lengths=lengths_B,
            dropout_p=dropout,
        )
        assert isinstance(y_BHTK, Tensor)
        kept = k_BGTK.shape[2] if pattern.reach is None else min(k_BGTK.shape[2], pattern.reach)
        return y_BHTK, _last(k_BGTK, kept, lengths_B), _last(v_BGTK, kept, lengths_B)

    def queries(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Queries `[B, H, T, K]`, rotated to their positions."""
        return self.rotated(self.split(self.query(x_BTD)), start)

    def keys(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Keys `[B, G, T, K]`, rotated to their positions."""
        return self.rotated(self.split(self.key(x_BTD), self.kv_heads), start)

    def kv_values(self, x_BTD: Tensor) -> Tensor:
        """Values `[B, G, T, K]`, before query heads share them."""
        return self.split(self.value(x_BTD), self.kv_heads)

    def rotated(self, x_BHTK: Tensor, start: int | Tensor) -> Tensor:
        """`x` with rotary positions, where the option asks for them."""
        return rotate(x_BHTK, start, self.config.rope_base) if self.config.rope else x_BHTK

    def values(self, x_BTD: Tensor) -> Tensor:
        """Values `[B, H, T, K]`."""
        return self.shared(self.kv_values(x_BTD))

    def shared(self, x_BGTK: Tensor) -> Tensor:
        """From key heads to the query heads that share them."""
        return x_BGTK.repeat_interleave(self.config.num_heads // self.kv_heads, 1)

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """The output projection."""
        return self.out(self.join(y_BHTV))

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """`softmax(q k^T / sqrt(K))` over the allowed keys."""
        return softmax_weights(self.queries(x_BTD), self.keys(x_BTD), self.pattern)

    def score_entries(self, tokens: int) -> int:
        """Entries of all tiles."""
        groups = static_groups(self.pattern, 0, tokens, 0, tokens) if tokens else ()
        return self.config.num_heads * sum(g.rows * g.keys * g.count for g in groups)

    def mixing_flops(self, tokens: int) -> int:
        """Two products of K channels an entry."""
        return 4 * self.config.dim // self.config.num_heads * self.score_entries(tokens)

    def state_bytes(self, tokens: int) -> int:
        """Keys and values in reach."""
        return 2 * 4 * self.kv_dim * (tokens if self.pattern.reach is None else min(tokens, self.pattern.reach))


def _last(x_BGSK: Tensor, kept: int, lengths_B: Tensor | None) -> Tensor:
    """Each row's last `kept` real slots; before its first they repeat slot 0, now at a negative position."""
    S = x_BGSK.shape[2]
    if lengths_B is None:
        # A copy, so that a small cache does not keep the whole prompt alive.
        return x_BGSK if kept == S else x_BGSK[:, :, S - kept :].clone(memory_format=torch.contiguous_format)
    slots_BS = (lengths_B[:, None] - kept + torch.arange(kept, device=x_BGSK.device)).clamp(min=0)
    return x_BGSK.gather(2, slots_BS[:, None, :, None].expand(*x_BGSK.shape[:2], kept, x_BGSK.shape[3]))
