"""Luna, linear unified nested attention (Ma et al. 2021, arXiv:2106.01540): attention packed into a memory and back.

Bidirectional, with Attn(q, k, v) = softmax(q k^T / sqrt(d)) v in heads and a memory P of l vectors:

    y_t = Attn(x_t, Y, Y),    Y = Attn(P, x, x),    P' = LayerNorm(Y + P), handed to the next layer

Queries, keys and values are linear maps of these arguments. With `tied` the keys and values of x are one map, and so
are those of Y, as in the authors' code; Y is not projected before its norm. The norm has no scale and offset, which
would have no effect in the last layer. P travels in the state, as the entry `handed`: a layer reads it from the state
that it is given and returns P' (causal: P) under the same name. With U_h the unpacking weights of head h and A_g the
packing weights of pack head g, the output of head h is sum_g U_h A_g v_gh, where v_gh is the part of pack head g that
head h reads: `weights` are these H x G matrices, whose rows sum to one.

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

from subquad.attention.base import Attention, join, split, takes_options
from subquad.attention.laws import Law
from subquad.attention.memories.all_keys import AllKeys, attend_few, shares
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.ops.backends import without_autocast
from subquad.ops.documents import Documents
from subquad.ops.precision import widened
from subquad.state import State


class Luna(Attention):
    """All tokens, or all earlier ones, through a memory of fixed size."""

    name = "luna"
    summary = "every earlier token, through a memory of fixed size"
    paper = "Ma et al. 2021, arXiv:2106.01540"
    forms = ("causal", "bidirectional")
    takes_handed = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
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
        self.channels, self.pack_heads = config.dim // config.num_heads, config.pack_heads or config.num_heads
        self.value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.pack_query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.pack_value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = self.pack_key = None
        if not config.tied:
            self.key = nn.Linear(config.dim, config.dim, bias=config.bias)
            self.pack_key = None if config.causal else nn.Linear(config.dim, config.dim, bias=config.bias)
        # Unit variance, like the tokens after a norm.
        self.memory = nn.Parameter(torch.randn(config.memory_tokens, config.dim)) if config.own_memory else None

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Mix with the memory that the layer below hands on, or else the layer's own.

        A causal layer hands on the memory that it was given. A state can only be used with the memory that made it.
        """
        begun = past.handed is not None and past.given is not None
        memory_BLD = self.given_or_own(past.handed.to(x_BTD.dtype) if begun else past.handed, x_BTD.shape[0])
        if self.causal:
            y_BHTV, handed_BLD = self.accumulated(x_BTD, memory_BLD, past), memory_BLD
        else:
            p_BGLK, k_BGTK, v_BGTK = self.pack_inputs(x_BTD, memory_BLD)
            (tokens,) = past.keep(tokens=AllKeys(k_BGTK, v_BGTK, self.dropout_p))
            packed_BLD = join(tokens.read(p_BGLK))
            handed_BLD = F.layer_norm(packed_BLD + memory_BLD, packed_BLD.shape[-1:])
            y_BHTV = attend_few(*self.unpack_inputs(x_BTD, packed_BLD), None, self.dropout_p)
        past.hand_on(handed_BLD.expand(x_BTD.shape[0], -1, -1))
        return y_BHTV

    def accumulated(self, x_BTD: Tensor, memory_BLD: Tensor, past: Past) -> Tensor:
        """Return the causal form's two scans, computed in float32 or wider: the sums exceed half precision."""
        v_BHTV, k_BHTK = self.values_and_keys(x_BTD)
        p_BHLK, pack_k_BHTK, _ = self.pack_inputs(x_BTD, memory_BLD)
        q_BHTK, k_BHTK, v_BHTV = widened(*split(self.channels, self.query(x_BTD)), k_BHTK, v_BHTV)
        b_BHTL = F.dropout(softplus_scores(pack_k_BHTK, p_BHLK), self.dropout_p)
        keys, values = past.keep(keys=Recurrence(k_BHTK, b_BHTL), values=Recurrence(b_BHTL, past.values(v_BHTV)))
        count_T1 = counts(past.start, b_BHTL)
        scores_BHTL = keys.read(q_BHTK / math.sqrt(self.channels)) / count_T1
        a_BHTL = F.dropout(scores_BHTL.softmax(-1), self.dropout_p)
        return (values.read(a_BHTL) / count_T1).to(x_BTD.dtype)

    def pack_inputs(self, x_BTD: Tensor, memory_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory's queries `[B, G, l, D / G]`, and the tokens' keys and values `[B, G, T, D / G]`."""
        width = self.config.dim // self.pack_heads
        q_BGLK, v_BGTK = split(width, self.pack_query(memory_BLD), self.pack_value(x_BTD))
        return q_BGLK, v_BGTK if self.pack_key is None else split(width, self.pack_key(x_BTD))[0], v_BGTK

    def unpack_inputs(self, x_BTD: Tensor, packed_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' queries `[B, H, T, D / H]`, and the packed memory's keys and values."""
        v_BHLV, k_BHLK = self.values_and_keys(packed_BLD)
        return split(self.channels, self.query(x_BTD))[0], k_BHLK, v_BHLV

    def values_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and keys, which are equal if `tied`."""
        (v_BHTV,) = split(self.channels, self.value(x_BTD))
        return v_BHTV, v_BHTV if self.key is None else split(self.channels, self.key(x_BTD))[0]

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
        memory_BLD = self.given_or_own(None if state is None else state.tensor("handed"), x_BTD.shape[0])
        return y_BTD, State({**after.entries, "handed": memory_BLD.expand(x_BTD.shape[0], -1, -1)}, self.config_hash)

    def given_or_own(self, handed_BLD: Tensor | None, batch: int) -> Tensor:
        """Return the memory `[B or 1, l, D]` to start from."""
        if handed_BLD is None:
            if self.memory is None:
                raise ValueError(
                    "this luna layer has no memory of its own (own_memory=False): the layer below hands one on"
                )
            # A copy: torch's FlopCounterMode refuses views of a parameter where no gradient is asked for.
            return self.memory[None].clone()
        shape = batch, self.config.memory_tokens, self.config.dim
        if handed_BLD.shape != shape:
            raise ValueError(f"handed, the memory, must have shape {shape}, got {tuple(handed_BLD.shape)}")
        return handed_BLD[:1] if handed_BLD.stride(0) == 0 else handed_BLD  # one for all rows is read once

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the weights; bidirectional `U_h A_g`, `[B, H G, T, T]`. Uses the layer's own memory."""
        if self.causal:
            return super().dense_weights(x_BTD)
        memory_BLD = self.given_or_own(None, x_BTD.shape[0])
        p_BGLK, k_BGTK, v_BGTK = self.pack_inputs(x_BTD, memory_BLD)
        pack_BGLT = shares(p_BGLK, k_BGTK)
        q_BHTK, k_BHLK, _ = self.unpack_inputs(x_BTD, join(pack_BGLT @ v_BGTK))
        return (shares(q_BHTK, k_BHLK)[:, :, None] @ pack_BGLT[:, None]).flatten(1, 2)

    def exemptions(self) -> dict[Law, str]:
        """Return the exempt laws: the bidirectional form changes the memory that it hands on."""
        memory = {} if self.causal else {Law.DOCUMENTS: "bidirectional: each sequence hands on a memory of its own"}
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


@without_autocast
def softplus_scores(k_BHTK: Tensor, p_BHLK: Tensor) -> Tensor:
    """Return B, `log2(1 + 2^(k . p / sqrt(K)))`, `[B, H, T, l]`, float32 or wider."""
    k, p = widened(k_BHTK, p_BHLK)
    scores_BHTL = k @ p.mT / math.sqrt(k.shape[-1])
    return torch.logaddexp2(scores_BHTL, torch.zeros_like(scores_BHTL))


def counts(seen: int | Tensor, like_BHTL: Tensor) -> Tensor:
    """Return t, the number of tokens read up to each one, `[B or 1, 1, T, 1]`."""
    first = seen.view(-1, 1, 1, 1) if isinstance(seen, Tensor) else seen
    t_T1 = torch.arange(1, like_BHTL.shape[2] + 1, device=like_BHTL.device)[:, None]
    return (t_T1 + first).to(like_BHTL.dtype)
