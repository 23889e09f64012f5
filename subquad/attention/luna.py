"""Luna, linear unified nested attention (Ma et al. 2021, arXiv:2106.01540): attention packed into a memory and back.

Bidirectional, with Attn(q, k, v) = softmax(q k^T / sqrt(d)) v in heads and a memory P of l vectors:

    y_t = Attn(x_t, Y, Y),    Y = Attn(P, x, x),    P' = LayerNorm(Y + P), handed to the next layer

Queries, keys and values are linear maps of what stands there; the keys and values of x are one map, and those of Y
(`tied`), as in the authors' code; Y is not projected before its norm. The norm has no scale and offset: they would do
nothing in the last layer. P travels in the state, as the entry `handed`: a layer reads it from the state that it is
given and returns P' (causal: P) under the same name. With U_h the unpacking weights of head h and A_g the packing
weights of pack head g, head h puts out sum_g U_h A_g v_gh: H x G weight matrices, each of whose rows sums to one, and
`merge` adds over g.

Causal, with f(a, b, z)_t = a_t (1/t) sum_{s <= t} b_s (x) z_s for a memory P that no token changes:

    y_t = f(A, B, v)_t,    A_t = softmax_l(f(q / sqrt(d), k, B)_t),    B_s = log2(1 + 2^(P k'_s / sqrt(d)))

(softplus to base 2, as in the authors' code). Rows do not sum to one: B is not normalised over tokens. k' is the map
`pack_value` of x, and k and v are one map of x where `tied`. Dropout acts on A and B, and on both attentions' weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.scanned import ScannedAttention, attend_few, real_mask, seen_after, widened
from subquad.ops import gated_scan
from subquad.ops.backends import without_autocast
from subquad.ops.documents import Documents
from subquad.parallel import Sent
from subquad.parallel.exchange import sent_for_prefix
from subquad.state import State


class Luna(ScannedAttention):
    """All tokens, or all earlier ones, through a memory of fixed size."""

    name = "luna"
    summary = "every earlier token, through a packed memory"
    paper = "Ma et al. 2021, arXiv:2106.01540"
    forms = ("causal", "bidirectional")
    parallel = True
    takes_handed = True

    @dataclass(frozen=True, kw_only=True)
    class Config(ScannedAttention.Config):
        """Options of Luna."""

        memory_tokens: int = 16
        """l, the number of vectors in the memory."""
        own_memory: bool = True
        """Whether the layer has its own learned memory, used when the layer below hands it none."""
        pack_heads: int | None = None
        """Heads G that pack the tokens into the memory, in the bidirectional form (None: num_heads)."""
        tied: bool = True
        """Whether one projection gives both keys and values."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(memory_tokens=1)
            if self.pack_heads is not None and (self.pack_heads < 1 or self.dim % self.pack_heads):
                raise ValueError(
                    f"pack_heads must be at least 1 and divide dim, got pack_heads={self.pack_heads}, dim={self.dim}"
                )
            if self.causal and self.pack_heads not in (None, self.num_heads):
                raise ValueError(
                    "the causal form packs and unpacks with the same heads, "
                    f"got pack_heads={self.pack_heads}, num_heads={self.num_heads}"
                )

    config: Config
    key: nn.Linear | None  # type: ignore[assignment]

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_distribution = not config.causal
        self.pack_heads = config.pack_heads or config.num_heads
        self.pack_query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.pack_value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = self.pack_key = None
        if not config.tied:
            self.key = nn.Linear(config.dim, config.dim, bias=config.bias)
            self.pack_key = None if config.causal else nn.Linear(config.dim, config.dim, bias=config.bias)
        # Of unit variance, like the tokens after a norm.
        self.memory = nn.Parameter(torch.randn(config.memory_tokens, config.dim)) if config.own_memory else None

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix with the memory in the state's entry `handed`, `[B, l, D]`, or else the layer's own.

        A causal layer hands on the memory that it was given; a state belongs to the memory that it was made with.
        """
        memory_BLD = self.given_or_own(state, x_BTD.shape[0], x_BTD.dtype)
        if self.causal:
            begun = state if state is not None and "seen" in state else None
            y_BHTV, after = self.accumulate(x_BTD, begun, lengths_B, memory_BLD)
            return self.merge(y_BHTV), self.handing(after, memory_BLD, x_BTD.shape[0])
        packed_BLD = self.packed(x_BTD, real_mask(lengths_B, x_BTD.shape[1]), memory_BLD)
        v_BHLV = self.split(self.value(packed_BLD))
        k_BHLK = v_BHLV if self.key is None else self.split(self.key(packed_BLD))
        y_BHTV = attend_few(self.split(self.query(x_BTD)), k_BHLK, v_BHLV, None, self.dropout_p)
        handed_BLD = F.layer_norm(packed_BLD + memory_BLD, packed_BLD.shape[-1:])
        after = State({"seen": seen_after(None, x_BTD.shape[1], lengths_B)}, self.config_hash)
        return self.merge(y_BHTV), self.handing(after, handed_BLD, x_BTD.shape[0])

    def mix_documents(self, x_BTD: Tensor, documents: Documents, state: State | None) -> tuple[Tensor, State]:
        """Mix packed documents, each beginning with the row's memory.

        Raises `ValueError` in the bidirectional form, which changes the memory.
        """
        if not self.causal:
            raise ValueError(
                f"a bidirectional {self.name} layer hands on a memory of each sequence and takes no packed documents: "
                "give it one document a row, with a mask"
            )
        y_BTD, after = super().mix_documents(x_BTD, documents, state)
        return y_BTD, self.handing(after, self.given_or_own(state, x_BTD.shape[0], x_BTD.dtype), x_BTD.shape[0])

    def handing(self, state: State, memory_BLD: Tensor, batch: int) -> State:
        """Return the state with the memory that goes to the layer above, a row each."""
        return State({**state.entries, "handed": memory_BLD.expand(batch, -1, -1)}, self.config_hash)

    def given_or_own(self, state: State | None, batch: int, dtype: torch.dtype) -> Tensor:
        """Return the memory `[B or 1, l, D]` to start from."""
        if state is None or "handed" not in state:
            if self.memory is None:
                raise ValueError(
                    "this luna layer has no memory of its own (own_memory=False): the layer below hands one on"
                )
            # A copy: torch's FlopCounterMode refuses views of a parameter where no gradient is asked for.
            return self.memory[None].clone()
        L, D = self.config.memory_tokens, self.config.dim
        memory_BLD = state.tensor("handed")
        if "seen" in state:
            memory_BLD = memory_BLD.to(dtype)
        if memory_BLD.shape != (batch, L, D):
            raise ValueError(f"handed, the memory, must have shape {(batch, L, D)}, got {tuple(memory_BLD.shape)}")
        return memory_BLD[:1] if memory_BLD.stride(0) == 0 else memory_BLD  # one for all rows is read once

    def packed(self, x_BTD: Tensor, mask_BT: Tensor | None, memory_BLD: Tensor) -> Tensor:
        """Return Y, what the memory reads of the tokens, `[B, l, D]`."""
        q_BGLK, k_BGTK, v_BGTK = self.pack_inputs(x_BTD, memory_BLD)
        return self.join(attend_few(q_BGLK, k_BGTK, v_BGTK, mask_BT, self.dropout_p))

    def pack_inputs(self, x_BTD: Tensor, memory_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory's queries `[B, G, l, D / G]`, and the tokens' keys and values `[B, G, T, D / G]`."""
        q_BGLK = self.split(self.pack_query(memory_BLD), self.pack_heads)
        v_BGTK = self.split(self.pack_value(x_BTD), self.pack_heads)
        return q_BGLK, v_BGTK if self.pack_key is None else self.split(self.pack_key(x_BTD), self.pack_heads), v_BGTK

    def accumulate(
        self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None, memory_BLD: Tensor
    ) -> tuple[Tensor, State]:
        """Compute the two scans of the causal form."""
        mask_BT = real_mask(lengths_B, x_BTD.shape[1])
        q_BHTK, k_BHTK, v_BHTV, b_BHTL = self.inputs(x_BTD, memory_BLD)
        b_BHTL = F.dropout(b_BHTL, self.dropout_p)
        state = self.sums_to_here(state, keys=(k_BHTK, b_BHTL), values=(b_BHTL, v_BHTV))
        count = counts(0 if state is None else state.seen, b_BHTL)
        before = (None, None) if state is None else (state.tensor("keys"), state.tensor("values"))
        scores_BHTL, keys_BHKL = gated_scan(q_BHTK, k_BHTK, b_BHTL, None, state=before[0], mask=mask_BT)
        a_BHTL = F.dropout((scores_BHTL / count).softmax(-1), self.dropout_p)
        y_BHTV, values_BHLV = gated_scan(a_BHTL, b_BHTL, v_BHTV, None, state=before[1], mask=mask_BT)
        seen = seen_after(state, x_BTD.shape[1], lengths_B)
        after = State({"seen": seen, "keys": keys_BHKL, "values": values_BHLV}, self.config_hash)
        return (y_BHTV / count).to(x_BTD.dtype), after

    def inputs(self, x_BTD: Tensor, memory_BLD: Tensor) -> tuple[Tensor, ...]:
        """Return scaled queries, keys, values and B of the causal form, in float32: sums outgrow half precision."""
        v_BHTV = self.values(x_BTD)
        k_BHTK = v_BHTV if self.key is None else self.split(self.key(x_BTD))
        p_BHLK, pack_k_BHTK, _ = self.pack_inputs(x_BTD, memory_BLD)
        q_BHTK, k_BHTK, v_BHTV = widened(self.split(self.query(x_BTD)), k_BHTK, v_BHTV)
        return q_BHTK / math.sqrt(self.channels), k_BHTK, v_BHTV, softplus_scores(pack_k_BHTK, p_BHLK)

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values `[B, H, T, V]`; bidirectional v_gh, `[B, H G, T, V]`: what head h reads of pack head g."""
        if self.causal:
            return super().values(x_BTD)
        H, G = self.config.num_heads, self.pack_heads
        packed_BGTK = self.split(self.pack_value(x_BTD), G)
        v_BHGTV = torch.einsum("bgtk,hvgk->bhgtv", packed_BGTK, self.value.weight.view(H, -1, G, packed_BGTK.shape[-1]))
        if self.value.bias is not None:
            # A share for each g, as each of their rows of weights sums to one.
            v_BHGTV = v_BHGTV + self.value.bias.view(H, 1, 1, -1) / G
        return v_BHGTV.flatten(1, 2)

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """Sum over the pack heads if they are separate, and apply the output projection."""
        return self.out(self.join(y_BHTV.unflatten(1, (self.config.num_heads, -1)).sum(2)))

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `A_t . B_s / t`; bidirectional `U_h A_g`, `[B, H G, T, T]`. Uses the layer's own memory."""
        memory_BLD = self.given_or_own(None, x_BTD.shape[0], x_BTD.dtype)
        if self.causal:
            q_BHTK, k_BHTK, _, b_BHTL = self.inputs(x_BTD, memory_BLD)
            count = counts(0, b_BHTL)
            a_BHTL = ((q_BHTK @ k_BHTK.mT).tril() / count @ b_BHTL).softmax(-1)
            return ((a_BHTL @ b_BHTL.mT).tril() / count).to(x_BTD.dtype)
        packed_BLD = self.packed(x_BTD, None, memory_BLD)
        key = self.value if self.key is None else self.key
        unpack_BHTL = shares(self.split(self.query(x_BTD)), self.split(key(packed_BLD)))
        pack_BGLT = shares(*self.pack_inputs(x_BTD, memory_BLD)[:2])
        return (unpack_BHTL[:, :, None] @ pack_BGLT[:, None]).flatten(1, 2)

    @property
    def weight_heads(self) -> int:
        """Number of weight matrices: H, or H G in the bidirectional form, one for each head and pack head."""
        return self.config.num_heads * (1 if self.causal else self.pack_heads)

    def exemptions(self) -> dict[int, str]:
        """Return the exempt laws: the bidirectional form changes the memory that it hands on."""
        memory = {} if self.causal else {15: "bidirectional: each sequence hands on a memory of its own"}
        return super().exemptions() | memory

    def adopt(self, handed: Tensor | None) -> Tensor | None:
        """Keep a memory `[l, D]` as the layer's own if it has none or is bidirectional; return the layer's own."""
        if handed is not None and (self.memory is None or not self.causal):
            self.memory = handed if isinstance(handed, nn.Parameter) else nn.Parameter(handed, requires_grad=False)
        return self.memory

    def _alone(self, x_BTD: Tensor) -> tuple[Tensor, State]:
        """Run the layer, handing a memory to one that has none of its own."""
        if self.config.own_memory:
            return self(x_BTD)
        memory_BLD = torch.empty(x_BTD.shape[0], self.config.memory_tokens, self.config.dim, requires_grad=True)
        return self(x_BTD, State({"handed": memory_BLD}, self.config_hash))

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of both sums in each of log2(P) steps; each rank has the memory."""
        return sent_for_prefix(2 * 4 * self.config.memory_tokens * self.config.dim, ranks)


@without_autocast
def softplus_scores(k_BHTK: Tensor, p_BHLK: Tensor) -> Tensor:
    """Return B, `log2(1 + 2^(k . p / sqrt(K)))`, `[B, H, T, l]`, float32 or wider."""
    k, p = widened(k_BHTK, p_BHLK)
    scores_BHTL = k @ p.mT / math.sqrt(k.shape[-1])
    return torch.logaddexp2(scores_BHTL, torch.zeros_like(scores_BHTL))


def shares(q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
    """Return `softmax_s(q k^T / sqrt(K))`, dense."""
    return (q_BHTK @ k_BHSK.mT / math.sqrt(q_BHTK.shape[-1])).softmax(-1)


def counts(seen: int | Tensor, like_BHTL: Tensor) -> Tensor:
    """Return t, the number of tokens read up to each one, `[B or 1, 1, T, 1]`."""
    first = seen.view(-1, 1, 1, 1) if isinstance(seen, Tensor) else seen
    t_T1 = torch.arange(1, like_BHTL.shape[2] + 1, device=like_BHTL.device)[:, None]
    return (t_T1 + first).to(like_BHTL.dtype)
