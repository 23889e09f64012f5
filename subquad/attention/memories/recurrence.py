"""The gated or delta scan as a memory: `S_t = A_t S_{t-1} + b_t k_t (x) v_t`; a read gives `q_t S_t`.

Shape letters: B batch, H heads, G groups of heads, T tokens, S earlier tokens, K key channels, V value channels, F = 1
or K decays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.memories.running_softmax import real_rows
from subquad.ops import delta_scan, gated_scan
from subquad.ops.backends import without_autocast
from subquad.ops.precision import at_least_float32, widened

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What tokens write: keys `[B, G, T, K]` and values `[B, H, T, V]`; `read(q)` gives `q_t S_t`.

    Without `beta` A_t is the decay f_t and b_t is 1; with it `A_t = (I - b_t k_t k_t^T) f_t`, the delta rule. With
    `log_g` in place of both the value channels decay, `S_t = S_{t-1} g_t + k_t (x) v_t`. `normalise` divides the
    outputs by the sum of the weights plus `eps`, for keys and queries without negative channels. The state is S, `[B,
    H, K, V]`; normalised, its last value channel sums the keys.
    """

    k: Tensor
    v: Tensor
    log_f: Tensor | None = None
    """Logarithms of the decays, `[B, H, T, F]` (None: no decay)."""
    beta: Tensor | None = None
    """Strengths of the delta rule, `[B, H, T, 1]` (None: the gated scan)."""
    log_g: Tensor | None = None
    """Logarithms of decays of the value channels, `[B, H, T, V]`, without log_f, beta and normalise."""
    normalise: bool = False
    eps: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        if self.log_g is not None and (self.log_f is not None or self.beta is not None or self.normalise):
            raise ValueError("log_g, decays of the values, goes without log_f, beta and normalise")

    def read(self, q_BGTK: Tensor, before: Tensors | None, at: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs `[B, H, T, V]`, in float32 or wider unless they are means, and the state."""
        k, v, log_f, beta = self.k, self.v, self.log_f, self.beta
        state, mask = None if before is None else before[0], at.mask
        if beta is not None:
            out, after = delta_scan(q_BGTK, k, at_least_float32(v), beta, log_f, state=state, mask=mask)
        elif self.normalise:
            out, after = gated_scan(q_BGTK, k, v, log_f, state=state, mask=mask, normalise=True, eps=self.eps)
        else:
            out, after = gated_scan(q_BGTK, k, at_least_float32(v), log_f, log_g=self.log_g, state=state, mask=mask)
        return out, (after,)

    def read_all(self, q_BHTK: Tensor, at: Any) -> Tensor:
        """Return the outputs of sums over all real tokens, divided by the sums of the weights."""
        return sums_of_all(q_BHTK, self.k, self.v, at.mask, self.eps)

    def literal(self, q_BGTK: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values, in the dtype of `read`'s outputs.

        If value channels decay, each has weights of its own.
        """
        share = self.v.shape[1] // q_BGTK.shape[1]
        q, k = (x.repeat_interleave(share, 1) for x in (q_BGTK, self.k))
        if self.log_g is not None:
            w_BHTSV = scan_weights(q, k, None, None)[..., None] * decays_between(self.log_g)
            return (w_BHTSV * at_least_float32(self.v)[:, :, None]).sum(3)
        if not self.normalise:
            return scan_weights(q, k, self.log_f, self.beta) @ at_least_float32(self.v)
        w_BHTS = scan_weights(q, k, self.log_f, None) if causal else at_least_float32(q) @ at_least_float32(k).mT
        total_BHT1 = w_BHTS.sum(-1, keepdim=True) + self.eps
        return (w_BHTS / total_BHT1.masked_fill(total_BHT1 == 0, torch.inf)).to(self.v.dtype) @ self.v

    # Between ranks: a summary is the factor on an earlier state, then the state that these tokens alone make. The
    # factor is the sum of the log decays, or the delta rule's transition less the identity; without decays there is
    # none.

    @property
    def empty(self) -> tuple[float, ...]:
        """The summary of no tokens."""
        return (0.0,) if self._log_decays is None and self.beta is None else (0.0, 0.0)

    def summary(self) -> Tensors:
        """Return the summary of these tokens."""
        if self.beta is not None:
            return self._transition()
        if self._log_decays is None:
            return (outer_sums(self.k, self.v, self.normalise),)
        v = F.pad(self.v, (0, 1), value=1.0) if self.normalise else self.v
        return decayed_outer_sums(self.k, v, self._log_decays, of_values=self.log_g is not None)

    def merge(self, earlier: Tensors, later: Tensors) -> Tensors:
        """Return the summary of the tokens of both."""
        if len(earlier) == 1:
            return (earlier[0] + later[0],)
        (move_1, s_1), (move_2, s_2) = earlier, later
        if self.beta is None:
            return move_1 + move_2, move_2.exp().to(s_1.dtype) * s_1 + s_2
        return move_1 + move_2 + move_2 @ move_1, s_1 + move_2 @ s_1 + s_2

    def begin(self, summary: Tensors) -> Tensors:
        """Return the state of a summary."""
        return summary[-1:]

    @property
    def _log_decays(self) -> Tensor | None:
        return self.log_f if self.log_g is None else self.log_g

    def _transition(self) -> Tensors:
        k, v = self.k, self.v
        assert self.beta is not None
        K, V = k.shape[3], v.shape[3]
        state = F.pad(torch.eye(K, device=k.device).expand(*v.shape[:2], K, K), (V, 0))
        found = delta_scan(k, k, F.pad(v, (0, K)), self.beta, self.log_f, state=state).state
        return found[..., V:] - state[..., V:], found[..., :V]


def scan_weights(q_BHTK: Tensor, k_BHSK: Tensor, log_f_BHTF: Tensor | None, beta_BHT1: Tensor | None) -> Tensor:
    """Return the weights of a scan in float32 or wider.

    The products of a delta scan's transitions are those of a triangular system: with P the scores of queries and keys
    and N those of keys below the diagonal, both decayed, `w = P (I + b N)^-1 b`.
    """
    q, k = at_least_float32(q_BHTK), at_least_float32(k_BHSK)
    decay = None if log_f_BHTF is None else decays_between(log_f_BHTF)
    scores = decayed(q, k, decay).tril()
    if beta_BHT1 is None:
        return scores
    beta = at_least_float32(beta_BHT1)
    system, ones = beta * decayed(k, k, decay), torch.diag_embed(beta[..., 0])
    return scores @ torch.linalg.solve_triangular(system, ones, upper=False, unitriangular=True)


def decays_between(log_f_BHTF: Tensor) -> Tensor:
    """Return the product of the decays after token s up to t, `[B, H, T, S, F]`; 1 if s is later than t."""
    G_BHTF = log_f_BHTF.cumsum(2)
    return (G_BHTF[:, :, :, None] - G_BHTF[:, :, None]).clamp(max=0).exp()


def decayed(q_BHTK: Tensor, k_BHSK: Tensor, decay_BHTSF: Tensor | None) -> Tensor:
    """Return the scores of queries and keys `[B, H, T, S]`, by channel times its decay."""
    if decay_BHTSF is None or decay_BHTSF.shape[-1] == 1:
        scores = q_BHTK @ k_BHSK.mT
        return scores if decay_BHTSF is None else scores * decay_BHTSF[..., 0]
    return (q_BHTK[:, :, :, None] * decay_BHTSF * k_BHSK[:, :, None]).sum(-1)


@without_autocast
def outer_sums(k_BHTK: Tensor, v_BHTV: Tensor, with_sum: bool) -> Tensor:
    """Return `sum_t k_t (x) v_t` in float32 or wider; `with_sum` adds a last channel, `sum_t k_t`."""
    k, v = widened(k_BHTK, v_BHTV)
    return k.mT @ (F.pad(v, (0, 1), value=1.0) if with_sum else v)


@without_autocast
def decayed_outer_sums(k_BGTK: Tensor, v_BHTV: Tensor, log_f_BHTF: Tensor, *, of_values: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of the log decays `[B, H, F, 1]`, and the state that these tokens alone make.

    If the decays are those `of_values` the sum is `[B, H, 1, V]`.
    """
    v = at_least_float32(v_BHTV)
    k = k_BGTK.repeat_interleave(v.shape[1] // k_BGTK.shape[1], 1).to(v.dtype)
    G_BHTF = log_f_BHTF.double().cumsum(2)
    sum_BH1F = G_BHTF[:, :, -1:]
    to_end_BHTF = (sum_BH1F - G_BHTF).exp().to(v.dtype)
    if of_values:
        return sum_BH1F, k.mT @ (v * to_end_BHTF)
    return sum_BH1F.mT, (k * to_end_BHTF).mT @ v


@without_autocast
def sums_of_all(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None, eps: float) -> Tensor:
    """Return `o_t = q_t S / (q_t . z + eps)` with sums over all real tokens, and zero instead of a division by zero.

    The result is `[B, H, T, V]` in the dtype of v; sums are float32 or wider.
    """
    q, k, v = widened(q_BHTK, k_BHSK, v_BHSV)
    k = real_rows(k, mask_BS, 0.0)
    total_BHT1 = q @ k.sum(-2)[..., None] + eps
    out_BHTV = q @ (k.mT @ v) / total_BHT1.masked_fill(total_BHT1 == 0, torch.inf)
    return out_BHTV.to(v_BHSV.dtype)
