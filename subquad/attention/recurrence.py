"""One layer's gated or delta scan: its inputs, its weights, and its summary for other processes.

Shape letters: B batch, H heads, G groups of heads, T tokens, S earlier tokens, K key channels, V value channels, F = 1
or K decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import ScanOutput, delta_scan, gated_scan
from subquad.ops.backends import without_autocast
from subquad.parallel import ContextGroup, Sent
from subquad.parallel.exchange import prefix, sent_for_prefix


class Recurrence(NamedTuple):
    """`S_t = f_t * S_{t-1} + d_t k_t (x) v_t`, `o_t = q_t S_t + e v_t` (`ops.gated_scan`), or with beta the delta scan.

    The step d is a number of a token and head, the skip e one of a head; None stands for 1 and 0.
    """

    q_BGTK: Tensor
    k_BGTK: Tensor
    v_BHTV: Tensor
    log_f_BHTF: Tensor | None
    beta_BHT1: Tensor | None = None
    step_BHT1: Tensor | None = None
    skip_H11: Tensor | None = None

    def run(self, state: Tensor | None, mask: Tensor | None) -> ScanOutput:
        """Return the outputs `[B, H, T, V]`, in float32 or wider, and the state `[B, H, K, V]`."""
        q, k, v, log_f, beta, _, skip = self
        if beta is not None:
            return delta_scan(q, k, at_least_float32(v), beta, log_f, state=state, mask=mask)
        out, after = gated_scan(q, k, self.written(), log_f, state=state, mask=mask)
        return ScanOutput(out if skip is None else out + skip * at_least_float32(v), after)

    def written(self) -> Tensor:
        """Return what the gated scan writes, `d_t v_t`, in float32 or wider: outputs are normed, and large before."""
        v_BHTV = at_least_float32(self.v_BHTV)
        return v_BHTV if self.step_BHT1 is None else self.step_BHT1 * v_BHTV

    def weights(self) -> Tensor:
        """Return `w_ts = q_t A_t ... A_{s+1} k_s b_s`, `A_t = (I - b_t k_t k_t^T) f_t`, as `[B, H, T, S]`. Quadratic.

        Without beta, A_t is f_t and d_s takes the place of b_s. The skip is added to the diagonal.
        """
        q, k, v, log_f, beta, step, skip = self
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        w_BHTS = scan_weights(q, k, log_f, beta)
        w_BHTS = w_BHTS if step is None else w_BHTS * step.mT
        return w_BHTS if skip is None else w_BHTS + skip * torch.eye(q.shape[2], device=q.device, dtype=w_BHTS.dtype)

    def before(self, group: ContextGroup) -> Tensor:
        """Return the state after the earlier ranks' tokens.

        A rank sends its state and what becomes of an earlier one: a decay for each row of the state, or for the delta
        scan, which mixes them, a matrix `[K, K]` a head.
        """
        if self.beta_BHT1 is None:
            summary, merge = decayed_sum(self.k_BGTK, self.written(), self.log_f_BHTF), _after_decays
        else:
            summary, merge = self._transition(), _after_transitions
        return prefix(summary, merge, (0.0, 0.0), group)[1]

    def _transition(self) -> tuple[Tensor, Tensor]:
        """Return what these tokens make of an earlier state, less the identity, `[B, H, K, K]`, and their own state."""
        q, k, v, log_f, beta, *_ = self
        assert beta is not None
        K, V = k.shape[3], v.shape[3]
        state = torch.eye(K, device=k.device).expand(*v.shape[:2], K, K)
        state = F.pad(state, (V, 0))
        found = delta_scan(q, k, F.pad(v, (0, K)), beta, log_f, state=state).state
        return found[..., V:] - state[..., V:], found[..., :V]

    @staticmethod
    def sent(heads: int, key_channels: int, value_channels: int, decays: int, ranks: int) -> list[Sent]:
        """Return the bytes of one summary in each of log2(P) steps: `decays` float64 a head, or K K float32 if 0."""
        moved = 8 * decays if decays else 4 * key_channels**2
        return sent_for_prefix(heads * (moved + 4 * key_channels * value_channels), ranks)


def at_least_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@without_autocast
def scan_weights(q_BHTK: Tensor, k_BHSK: Tensor, log_f_BHTF: Tensor | None, beta_BHT1: Tensor | None) -> Tensor:
    """Return the weights of a scan in float32 or wider.

    The products of a delta scan's transitions are those of a triangular system: with P the scores of queries and keys
    and N those of keys below the diagonal, both decayed, `w = P (I + b N)^-1 b`.
    """
    q, k = at_least_float32(q_BHTK), at_least_float32(k_BHSK)
    decay = None
    if log_f_BHTF is not None:
        G_BHTF = log_f_BHTF.cumsum(2)
        decay = (G_BHTF[:, :, :, None] - G_BHTF[:, :, None]).clamp(max=0).exp()
    scores = decayed(q, k, decay).tril()
    if beta_BHT1 is None:
        return scores
    beta = at_least_float32(beta_BHT1)
    system, ones = beta * decayed(k, k, decay), torch.diag_embed(beta[..., 0])
    return scores @ torch.linalg.solve_triangular(system, ones, upper=False, unitriangular=True)


@without_autocast
def decayed_sum(k_BGTK: Tensor, v_BHTV: Tensor, log_f_BHTF: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of the logarithms of the decays `[B, H, F, 1]`, and the state that these tokens alone make."""
    v = at_least_float32(v_BHTV)
    k = k_BGTK.repeat_interleave(v.shape[1] // k_BGTK.shape[1], 1).to(v.dtype)
    if log_f_BHTF is None:
        return k.new_zeros(*v.shape[:2], 1, 1, dtype=torch.float64), k.mT @ v
    G_BHTF = log_f_BHTF.double().cumsum(2)
    return G_BHTF[:, :, -1, :, None], (k * (G_BHTF[:, :, -1:] - G_BHTF).exp().to(v.dtype)).mT @ v


def decayed(q_BHTK: Tensor, k_BHSK: Tensor, decay_BHTSF: Tensor | None) -> Tensor:
    """Return the scores of queries and keys `[B, H, T, S]`, by channel times its decay."""
    if decay_BHTSF is None or decay_BHTSF.shape[-1] == 1:
        scores = q_BHTK @ k_BHSK.mT
        return scores if decay_BHTSF is None else scores * decay_BHTSF[..., 0]
    return (q_BHTK[:, :, :, None] * decay_BHTSF * k_BHSK[:, :, None]).sum(-1)


def _after_decays(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], /) -> tuple[Tensor, ...]:
    (g_1, s_1), (g_2, s_2) = earlier, later
    return g_1 + g_2, g_2.exp().to(s_1.dtype) * s_1 + s_2


def _after_transitions(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], /) -> tuple[Tensor, ...]:
    (n_1, s_1), (n_2, s_2) = earlier, later  # transitions are I + n, so that zeros are the neutral element
    return n_1 + n_2 + n_2 @ n_1, s_1 + n_2 @ s_1 + s_2
