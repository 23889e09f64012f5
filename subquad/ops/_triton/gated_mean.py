"""The gated mean of earlier tokens (ELiTA) in Triton kernels: three launches forward, three backward, one for a token.

    y_t = g_t mu_t + (1 - g_t) v_t,   mu_t = sum_{s <= t} softmax_{s <= t}(k_s) v_s,   g_t = sigmoid(gate_t + lse_t)

See gated_mean_kernels.py for the method. Besides inputs and outputs, the state before each block of tokens is kept for
the backward pass: m, z, and U with as many channels as a value.

Shape letters: B batch, H heads, T tokens, V value channels, N = B H, S blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from subquad.ops._triton import common
from subquad.ops._triton import gated_mean_kernels as kernels
from subquad.ops._triton.softmax import PRECISIONS, contiguous, empty_like
from subquad.tracing import saves, without_tangents

BLOCK = 32
FLOAT32_BLOCK = 16
"""Tokens per block; in float32 products don't run on tensor cores, and their number grows with the block."""
TILE = 32
"""Most value channels per tile, so that operands fit into the registers of one warp."""
STATE_TILE = 16
STATE_BLOCKS = 64
"""Value channels and blocks per tile of the passes over blocks."""


class Inputs(NamedTuple):
    """Inputs of the kernels with channels side by side, factors without gaps, the mask as bytes, and the state."""

    gate: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor | None
    mask: Tensor | None
    lse: Tensor | None
    mean: Tensor | None

    @classmethod
    def of(cls, gate: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> Inputs:
        factors, mask, lse, mean = map(contiguous, rest)
        return cls(gate, k, common.rows(v), factors, None if mask is None else mask.view(torch.uint8), lse, mean)

    @property
    def block(self) -> int:
        """Tokens per block, by dtype alone: a new length doesn't recompile."""
        return FLOAT32_BLOCK if self.v.dtype == torch.float32 else BLOCK

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.v.shape[2], self.block)

    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for m (of one block more), z and U of every block."""
        B, H, _, V = self.v.shape
        N, S = B * H, self.blocks
        m_NS = self.v.new_empty(N, S + 1, dtype=torch.float32)
        return m_NS, m_NS.new_empty(N, S), m_NS.new_empty(N, S, V)

    def launch(
        self,
        kernel: Any,
        *arguments: Tensor | None,
        columns: tuple[Tensor, ...],
        rows: tuple[Tensor, ...],
        dots: str = "",
    ) -> None:
        """Launch a program for each block: tensors, then strides of those with one number and with V a token.

        `dots` names the constants of matrix products that the kernel takes.
        """
        B, H, T, V = self.v.shape
        constants = PRECISIONS[self.v.dtype].constants()
        common.launch(
            kernel,
            (B * H * self.blocks,),
            *(*arguments, T, H, self.blocks, *common.strides(*columns, *rows)),
            V=V,
            VALUES=min(common.tile(V), TILE),
            CHUNK=self.block,
            num_warps=1,
            ALIGNED=V % 16 == 0 and not any(stride % 16 for stride in common.strides(*rows)),
            **{name: constants[name] for name in dots.split()},
        )

    def launch_states(self, kernel: Any, *arguments: Tensor | None) -> None:
        """Launch a program for each head and tile of channels, which passes over the blocks."""
        B, H, _, V = self.v.shape
        grid = B * H, triton.cdiv(V, STATE_TILE)
        common.launch(kernel, grid, *arguments, self.blocks, V=V, VALUES=STATE_TILE, ROWS=STATE_BLOCKS)


class Results(NamedTuple):
    """Outputs, final lse (float64) and mean, and, for the backward pass, m, z and U before each block."""

    out: Tensor
    lse: Tensor
    mean: Tensor
    m: Tensor
    z: Tensor
    u: Tensor

    @classmethod
    def of(cls, given: Inputs, save: bool) -> Results:
        B, H, _, V = given.v.shape
        lse, mean = given.v.new_empty(B, H, 1, dtype=torch.float64), given.v.new_empty(B, H, 1, V, dtype=torch.float32)
        return cls(empty_like(given.v), lse, mean, *(given.states() if save else (mean.new_empty(0) for _ in range(3))))


class Gradients(NamedTuple):
    """Gradients of gate, k, v and the initial lse and mean; the last two are empty if there is no initial state."""

    gate: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    mean: Tensor

    @classmethod
    def of(cls, given: Inputs) -> Gradients:
        gate, k, v, *_, lse, mean = given
        dlse, dmean = (v.new_empty(0) if x is None else x.new_empty(x.shape) for x in (lse, mean))
        return cls(gate.new_empty(gate.shape), k.new_empty(k.shape), empty_like(v), dlse, dmean)


def gated_mean(
    gate_BHT1: Tensor,
    logits_BHT1: Tensor,
    v_BHTV: Tensor,
    factors_BHT2: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    mask_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs in v's dtype, the last logsumexp (float64) and mean (float32). Raises as `common.check_device`."""
    common.check_device("gated_mean", gate_BHT1, logits_BHT1, v_BHTV)
    lse, mean = (None, None) if state is None else (state[0].double(), state[1].float())
    inputs = (gate_BHT1, logits_BHT1, v_BHTV, factors_BHT2, mask_BT, lse, mean)
    out, end_lse, end_mean, *_ = gated_mean_op(*inputs, saves(*inputs))
    return out, end_lse, end_mean


@torch.library.custom_op("subquad::gated_mean_triton", mutates_args=())
def gated_mean_op(
    gate_BHT1: Tensor,
    k_BHT1: Tensor,
    v_BHTV: Tensor,
    factors_BHT2: Tensor | None,
    mask_BT: Tensor | None,
    lse_BH1: Tensor | None,
    mean_BH1V: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Results`."""
    given = Inputs.of(gate_BHT1, k_BHT1, v_BHTV, factors_BHT2, mask_BT, lse_BH1, mean_BH1V)
    results = Results.of(given, save)
    gate, k, v, factors, mask, lse, mean = given
    out, end_lse, end_mean, *starts = results
    B, H, T, V = v.shape
    if T == 0:
        end_lse.fill_(kernels.EMPTY.value) if lse is None else end_lse.copy_(lse)
        end_mean.zero_() if mean is None else end_mean.copy_(mean)
    elif T == 1 and not save and factors is None:
        values = min(common.tile(V), TILE)
        grid = B * H, triton.cdiv(V, values)
        strides = (stride for x in (gate, k, v, out) for stride in x.stride()[:2])
        common.launch(
            kernels.decode, grid, gate, k, v, mask, lse, mean, out, end_lse, end_mean, H, *strides, V=V, VALUES=values
        )
    else:
        sums = given.states()
        starts = starts if save else list(given.states())
        given.launch(kernels.block_sums, k, v, mask, *sums, columns=(k,), rows=(v,))
        given.launch_states(kernels.block_starts, lse, mean, *sums, *starts, end_lse, end_mean)
        given.launch(
            kernels.outputs, *(gate, k, v, factors, mask, *starts, out),
            columns=(gate, k), rows=(v, out), dots="DOT PRECISION",
        )  # fmt: skip
    return results


@gated_mean_op.register_fake
def _(gate, k, v, factors, mask, lse, mean, save):  # type: ignore[no-untyped-def]
    return Results.of(Inputs.of(gate, k, v, None, None, None, None), save)


@torch.library.custom_op("subquad::gated_mean_triton_backward", mutates_args=())
def gated_mean_backward_op(
    grad_BHTV: Tensor,
    dend_lse_BH1: Tensor | None,
    dend_mean_BH1V: Tensor | None,
    gate_BHT1: Tensor,
    k_BHT1: Tensor,
    v_BHTV: Tensor,
    factors_BHT2: Tensor | None,
    mask_BT: Tensor | None,
    lse_BH1: Tensor | None,
    mean_BH1V: Tensor | None,
    end_lse_BH1: Tensor,
    end_mean_BH1V: Tensor,
    m_NS: Tensor,
    z_NS: Tensor,
    u_NSV: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Gradients`."""
    given = Inputs.of(gate_BHT1, k_BHT1, v_BHTV, factors_BHT2, mask_BT, lse_BH1, mean_BH1V)
    gate, k, v, factors, mask, lse, mean = given
    do, dend_lse, dend_mean = common.rows(grad_BHTV), contiguous(dend_lse_BH1), contiguous(dend_mean_BH1V)
    gradients = Gradients.of(given)
    dgate, dk, dv, dlse, dmean = gradients
    if v.shape[2] == 0:
        for x, gradient in ((dlse, dend_lse), (dmean, dend_mean)):
            x.zero_() if gradient is None or lse is None else x.copy_(gradient)
        return gradients
    x, x_sums, x_ends = m_NS.new_empty(v.shape[:3]), torch.empty_like(z_NS), torch.empty_like(z_NS)
    r_sums, r_ends = torch.empty_like(u_NSV), torch.empty_like(u_NSV)
    shared = gate, k, v, do, factors, mask, m_NS, z_NS
    given.launch(
        kernels.row_gradients, *(*shared, u_NSV, dgate, x, r_sums, x_sums),
        columns=(gate, k), rows=(v, do), dots="DOT PRECISION",
    )  # fmt: skip
    ends = dend_lse, dend_mean, end_lse_BH1, end_mean_BH1V
    given.launch_states(kernels.block_ends, *ends, lse, m_NS, r_sums, x_sums, r_ends, x_ends, dlse, dmean)
    given.launch(
        kernels.token_gradients, *(*shared, x, r_ends, x_ends, mean, dmean, dlse, dk, dv),
        columns=(gate, k), rows=(v, do, dv), dots="DOT WIDE PRECISION",
    )  # fmt: skip
    return gradients


@gated_mean_backward_op.register_fake
def _(grad, dend_lse, dend_mean, gate, k, v, factors, mask, lse, mean, *saved):  # type: ignore[no-untyped-def]
    return Gradients.of(Inputs.of(gate, k, v, None, None, lse, mean))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    gate, k, v, factors, mask, lse, mean, *saved = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    inputs = gate, k, v, factors, mask, lse, mean
    dgate, dk, dv, dlse, dmean = gated_mean_backward_op(grad, *rest[:2], *inputs, *saved)
    return dgate, dk, dv, None, None, None if lse is None else dlse, None if mean is None else dmean, None


gated_mean_op.register_autograd(_backward, setup_context=_setup_context)
