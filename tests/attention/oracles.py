"""What the oracles share: heads of a projection, softmax over a list of keys, recurrences token by token.

An oracle is its paper's equations in plain loops, and none of this calls the engines, `past` or the layers' methods.

Shape letters: T tokens, S keys, H heads, D model width, K key channels, V value channels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.testing import AttentionContract


def agrees(contract: type[AttentionContract], num_heads: int = 2, **options: Any) -> None:
    """Compare the contract's oracle with the mechanism under other options."""
    sizes = {"num_heads": num_heads, "dim": 8 * num_heads}
    own = type(contract.__name__, (contract,), {"options": contract.options | options, **sizes})
    own().test_the_oracle_agrees()


def heads(y_TC: Tensor, count: int) -> list[Tensor]:
    """Cut the channels into `count` heads, each `[T, C / count]`."""
    return list(y_TC.chunk(count, -1))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + (1 + (-x.abs()).exp()).log()


def rms(x_V: Tensor, eps: float) -> Tensor:
    return x_V / (x_V.square().mean(-1, keepdim=True) + eps).sqrt()


def standardised(x_V: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x_V - x_V.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def attend(q_K: Tensor, k_SK: Tensor, v_SV: Tensor, sink: Tensor | None = None) -> Tensor:
    """Return one query's softmax over the keys; zeros if it sees none. `sink` is a logit without a value."""
    weights_S = (k_SK @ q_K / math.sqrt(len(q_K))).exp()
    total = weights_S.sum() + (0.0 if sink is None else sink.exp())
    return weights_S @ v_SV / total if len(k_SK) else v_SV.new_zeros(v_SV.shape[1])


def turned(x_TK: Tensor, base: float = 10000.0, channels: int | None = None) -> Tensor:
    """Rotate token p's channels (c, c + R/2) by the angle `p base^(-2c / R)`, for the first R channels."""
    R = channels or x_TK.shape[1]
    y_TK = x_TK.clone()
    for p in range(len(x_TK)):
        for c in range(R // 2):
            cos, sin = math.cos(p * base ** (-2 * c / R)), math.sin(p * base ** (-2 * c / R))
            first, second = x_TK[p, c], x_TK[p, c + R // 2]
            y_TK[p, c], y_TK[p, c + R // 2] = first * cos - second * sin, second * cos + first * sin
    return y_TK


def projected(
    layer: Any, x_TD: Tensor, own: str = "", norm: Callable[[Tensor], Tensor] = lambda k: k
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return each head's queries, keys and values; `own` begins the names of other projections."""
    config = layer.config
    H, G = config.num_heads, config.num_kv_heads or config.num_heads
    q = heads(getattr(layer, f"{own}query")(x_TD), H)
    k = heads(getattr(layer, f"{own}key")(x_TD), G)
    v = heads(getattr(layer, f"{own}value")(x_TD), G) if hasattr(layer, f"{own}value") else k
    k = [norm(each) for each in k]
    if config.rope:
        width = round(q[0].shape[1] * config.rope_fraction)
        q, k = ([turned(each, config.rope_base, width) for each in some] for some in (q, k))
    return q, *([each[h * G // H] for h in range(H)] for each in (k, v))


class SoftmaxContract(AttentionContract):
    """The contract of softmax over the keys that a token sees: a test class says which, `sees`."""

    def sees(self, t: int, s: int, head: int) -> bool:
        """Whether token t of a head sees token s."""
        raise NotImplementedError

    def is_moved(self, head: int) -> bool:
        """Whether a head is of the last half, which may have another pattern."""
        return head >= (self.num_heads + 1) // 2

    def oracle(self, layer: Any, x_TD: Tensor) -> Tensor:
        """Return `y_t = W_o [sum_s softmax_s(q_t . k_s / sqrt(K)) v_s]` over what token t sees."""
        q, k, v = projected(layer, x_TD)
        sinks = getattr(layer, "sink_logits", None)
        rows = []
        for t in range(len(x_TD)):
            seen = [[s for s in range(len(x_TD)) if self.sees(t, s, h)] for h in range(len(q))]
            sink = [None if sinks is None else sinks[h] for h in range(len(q))]
            rows.append(torch.cat([attend(q[h][t], k[h][s], v[h][s], sink[h]) for h, s in enumerate(seen)]))
        y_TC = torch.stack(rows)
        if getattr(layer, "gating", None) is not None:
            y_TC = y_TC / (1 + (-layer.gating(x_TD)).exp())
        return layer.out(y_TC)


def recurrence(q_TK: Tensor, k_TK: Tensor, v_TV: Tensor, f_TK: Tensor, beta_T: Tensor | None = None) -> Tensor:
    """Return `o_t = q_t S_t` of one head, `S_t = f_t S_{t-1} + k_t v_t`; with beta the delta rule writes instead."""
    S_KV, rows = torch.zeros(k_TK.shape[1], v_TV.shape[1], dtype=v_TV.dtype), []
    for t in range(len(q_TK)):
        S_KV = f_TK[t][:, None] * S_KV
        written_V = v_TV[t] if beta_T is None else beta_T[t] * (v_TV[t] - k_TK[t] @ S_KV)
        S_KV = S_KV + torch.outer(k_TK[t], written_V)
        rows.append(q_TK[t] @ S_KV)
    return torch.stack(rows)


def convolved(layer: Any, x_TD: Tensor) -> list[Tensor]:
    """Return queries, keys and values after the short convolution, `silu(b + sum_j w_j x_{t-W+1+j})`."""
    projections = layer.query, layer.key, layer.value
    z_TC = torch.cat([project(x_TD) for project in projections], -1)
    w_CW, bias = layer.convolution.weight, layer.convolution.bias
    W = w_CW.shape[1]
    rows = []
    for t in range(len(z_TC)):
        near = [(w_CW[:, j], t - W + 1 + j) for j in range(W)]
        y_C = torch.stack([w_C * z_TC[s] for w_C, s in near if s >= 0]).sum(0)
        rows.append(silu(y_C if bias is None else y_C + bias))
    return list(torch.stack(rows).split([project.out_features for project in projections], -1))


def delta_rule(layer: Any, x_TD: Tensor, f_HTK: list[Tensor] | None = None) -> list[Tensor]:
    """Return the delta rule's outputs of each head, divided by their root mean square, times the norm's weights."""
    config = layer.config
    H, G = config.num_heads, config.key_heads
    q, k, v = convolved(layer, x_TD)
    unit = [[each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in heads(some, G)] for some in (q, k)]
    q_GTK, k_GTK = [each / math.sqrt(config.keys) for each in unit[0]], unit[1]
    beta_TH = config.beta_range / (1 + (-layer.strength(x_TD)).exp())
    outputs = []
    for h, v_TV in enumerate(heads(v, H)):
        g = h * G // H
        f_TK = torch.ones_like(k_GTK[g]) if f_HTK is None else f_HTK[h]
        o_TV = recurrence(q_GTK[g], k_GTK[g], v_TV, f_TK, beta_TH[:, h])
        outputs.append(rms(o_TV, config.norm_eps) * layer.norm_weight)
    return outputs
