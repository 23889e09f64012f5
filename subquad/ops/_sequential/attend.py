"""Engine B in constant memory: queries and keys in chunks, one after another, under a running maximum and sum.

    m' = max(m, max_j s_j),   z' = z exp(m - m') + sum_j exp(s_j - m'),   a' = a exp(m - m') + sum_j exp(s_j - m') v_j

over the scores s of a chunk of keys, and `o = a / z` at the end (Rabe and Staats 2021, arXiv:2112.05682, sections 2 and
3). The backward pass recomputes the weights of each chunk. Besides inputs and outputs about `QUERY_CHUNK * KEY_CHUNK`
scores exist at once, whatever the batch, the heads and the length.

Shape letters: B batch, H heads, T queries, S keys, K key channels, V value channels; of a tile h heads,
C queries and W keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops.backends import without_autocast
from subquad.ops.patterns import Pattern
from subquad.ops.slots import SCHEMA, Slots, allowed_between, seen_slots
from subquad.tracing import without_tangents

QUERY_CHUNK = 1024
KEY_CHUNK = 4096


def attend(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    pattern: Pattern,
    slots: Slots,
    scale: float,
    dropout_p: float,
    chunks: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, T, V]` and logsumexp `[B, H, T]`; keys and values have as many heads as queries.

    Dropout acts on the weights after the softmax; the backward pass draws its mask again from the same seed.
    """
    seed = torch.randint(1 << 62, (), device=q_BHTK.device) if dropout_p else None
    settings = pattern.key(), scale, seed, dropout_p, *chunks, *slots
    out_BHTV, lse_BHT, _, _ = block_attention_sequential(q_BHTK, k_BHSK, v_BHSV, *settings)
    return out_BHTV, lse_BHT


SETTINGS = f"str pattern, float scale, Tensor? seed, float dropout_p, SymInt query_chunk, SymInt key_chunk, {SCHEMA}"
"""Arguments of the operators besides tensors of tokens; `Work` takes them."""


@torch.library.custom_op(
    "subquad::block_attention_sequential",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def block_attention_sequential(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the logsumexp of each query's scores (-inf if it sees no key), their maximum m and sum z.

    The backward pass uses `exp(s - m) / z`: with large scores, rounding to one logsumexp would cost digits.
    """
    work = Work(q_BHTK, k_BHSK, *settings)
    out_BHTV = q_BHTK.new_empty(*q_BHTK.shape[:3], v_BHSV.shape[-1])
    lse_BHT, m_BHT, z_BHT = (q_BHTK.new_empty(q_BHTK.shape[:3]) for _ in range(3))
    for block in work.blocks():
        out_hCV = out_BHTV[block.row, block.heads, block.queries].zero_()
        m_hC1 = torch.full_like(out_hCV[..., :1], -torch.inf)
        z_hC1 = torch.zeros_like(m_hC1)
        for keys in block.chunks:
            scores_hCW = work.scores(block, keys)
            top_hC1 = torch.maximum(m_hC1, scores_hCW.amax(-1, keepdim=True))
            # A row that has seen no key yet needs a finite maximum: -inf - -inf is NaN.
            floor_hC1 = top_hC1.masked_fill(torch.isneginf(top_hC1), 0.0)
            keep_hC1 = (m_hC1 - floor_hC1).exp_()
            w_hCW = scores_hCW.sub_(floor_hC1).exp_()
            z_hC1.mul_(keep_hC1).add_(w_hCW.sum(-1, keepdim=True))
            out_hCV.mul_(keep_hC1).add_(work.dropped(w_hCW) @ v_BHSV[block.row, block.heads, keys])
            m_hC1 = top_hC1
        out_hCV.div_(z_hC1.masked_fill(z_hC1 == 0, 1.0))
        for whole, part in ((m_BHT, m_hC1), (z_BHT, z_hC1), (lse_BHT, m_hC1 + z_hC1.log())):
            whole[block.row, block.heads, block.queries] = part.squeeze(-1)
    return out_BHTV, lse_BHT, m_BHT, z_BHT


@block_attention_sequential.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[-1]), *(q.new_empty(q.shape[:3]) for _ in range(3))


@torch.library.custom_op(
    "subquad::block_attention_sequential_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_lse, Tensor out, Tensor m, Tensor z, Tensor q, Tensor k, Tensor v, "
    f"{SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
@without_autocast
def block_attention_sequential_backward(
    grad_BHTV: Tensor,
    grad_lse_BHT: Tensor | None,
    out_BHTV: Tensor,
    m_BHT: Tensor,
    z_BHT: Tensor,
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `ds_ij = w_ij (do_i . v_j - do_i . o_i + dlse_i)`."""
    work = Work(q_BHTK, k_BHSK, *settings)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_BHTK, k_BHSK, v_BHSV))
    # Rows without keys have m = -inf and z = 0; their scores are -inf, and exp(-inf - 1) / 1 is zero, not NaN.
    unseen_BHT = z_BHT == 0
    m_BHT1, z_BHT1 = (x.masked_fill(unseen_BHT, 1.0)[..., None] for x in (m_BHT, z_BHT))
    shift_BHT1 = (grad_BHTV * out_BHTV).sum(-1, keepdim=True)
    if grad_lse_BHT is not None:
        shift_BHT1 -= grad_lse_BHT.masked_fill(unseen_BHT, 0.0)[..., None]
    for block in work.blocks():
        queries = block.row, block.heads, block.queries
        do_hCV = grad_BHTV[queries]
        for chunk in block.chunks:
            keys = block.row, block.heads, chunk
            w_hCW = work.scores(block, chunk).sub_(m_BHT1[queries]).exp_().div_(z_BHT1[queries])
            dropped_hCW, dw_hCW = w_hCW, do_hCV @ v_BHSV[keys].mT
            if work.seed is not None:
                kept_hCW = work.dropped(torch.ones_like(w_hCW))
                dropped_hCW = w_hCW * kept_hCW
                dw_hCW.mul_(kept_hCW)
            dv[keys] += dropped_hCW.mT @ do_hCV
            ds_hCW = dw_hCW.sub_(shift_BHT1[queries]).mul_(w_hCW).mul_(work.scale)
            dq[queries] += ds_hCW @ k_BHSK[keys]
            dk[keys] += ds_hCW.mT @ q_BHTK[queries]
    return dq, dk, dv


@block_attention_sequential_backward.register_fake
def _(grad, grad_lse, out, m, z, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, pattern, scale, seed, *static, lengths, q_pos, k_pos, q_doc, k_doc = inputs
    out, _, m, z = output
    ctx.save_for_backward(out, m, z, q, k, v, seed, lengths, q_pos, k_pos, q_doc, k_doc)
    ctx.rule, ctx.static = (pattern, scale), static
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(m, z)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    out, m, z, q, k, v, seed, *rows = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    settings = *ctx.rule, seed, *ctx.static, *rows
    gradients = block_attention_sequential_backward(grad, grad_lse, out, m, z, q, k, v, *settings)
    return *gradients, *(None for _ in range(13))


block_attention_sequential.register_autograd(_backward, setup_context=_setup_context)


def key_chunks(
    pattern: Pattern, queries: int, keys: int, starts: tuple[int, int] | None, query_chunk: int, key_chunk: int
) -> Iterator[tuple[slice, list[slice]]]:
    """Yield chunks of query slots with the chunks of key slots that they may see; `starts` as in `seen_slots`."""
    for start in range(0, queries, query_chunk):
        stop = min(start + query_chunk, queries)
        lo, hi = seen_slots(pattern, starts, start, stop, queries, keys)
        yield slice(start, stop), [slice(at, min(at + key_chunk, hi)) for at in range(lo, hi, key_chunk)]


class Block(NamedTuple):
    """Queries `[h, C]` processed together: some heads of one row of the batch."""

    row: int
    heads: slice
    queries: slice
    chunks: list[slice]
    """Chunks of the keys that they may see."""


class Work:
    """Tiles of the forward and the backward pass: their order, scores and dropout."""

    def __init__(
        self,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        pattern: str,
        scale: float,
        seed: Tensor | None,
        dropout_p: float,
        query_chunk: int,
        key_chunk: int,
        *slots: Any,
    ) -> None:
        self.q_BHTK, self.k_BHSK, self.scale, self.seed, self.dropout_p = q_BHTK, k_BHSK, scale, seed, dropout_p
        self.pattern, self.slots, self.chunks = Pattern.from_key(pattern), Slots(*slots), (query_chunk, key_chunk)
        self.generator = torch.Generator(q_BHTK.device)
        if seed is not None:
            self.generator.manual_seed(int(seed))

    def blocks(self) -> Iterator[Block]:
        """Yield blocks in a fixed order, with several heads each if their tiles are small."""
        (B, H, T, _), S = self.q_BHTK.shape, self.k_BHSK.shape[2]
        C, W = self.chunks
        spans = list(key_chunks(self.pattern, T, S, self.slots.starts, C, W))
        together = max(1, C * W // max(1, min(T, C) * min(S, W)))
        for row in range(B):
            for head in range(0, H, together):
                for queries, chunks in spans:
                    yield Block(row, slice(head, head + together), queries, chunks)

    def scores(self, block: Block, keys: slice) -> Tensor:
        """Return scores `[h, C, W]`, -inf if the query may not see the key."""
        q_hCK = self.q_BHTK[block.row, block.heads, block.queries]
        scores_hCW = (q_hCK @ self.k_BHSK[block.row, block.heads, keys].mT).mul_(self.scale)
        allowed_CW = self.allowed(block, keys)
        return scores_hCW if allowed_CW is None else scores_hCW.masked_fill_(~allowed_CW, -torch.inf)

    def allowed(self, block: Block, keys: slice) -> Tensor | None:
        """Return bool `[C, W]`, or None if every query sees every key."""
        q, k, q_start, k_start = block.queries, keys, self.slots.q_start, self.slots.k_start
        by_row = self.slots.starts is None or self.slots.lengths_B is not None
        if not by_row and self.pattern.sees_all(
            q.start + q_start, q.stop + q_start, k.start + k_start, k.stop + k_start
        ):
            return None
        q_slots, k_slots = (torch.arange(x.start, x.stop, device=self.q_BHTK.device) for x in (q, k))
        return allowed_between(self.pattern, self.slots.of_row(block.row), q_slots, k_slots)[0]

    def dropped(self, w_hCW: Tensor) -> Tensor:
        """Return `w` with dropout; tiles must come in the order of `blocks`, so that both passes draw the same mask."""
        if self.seed is None:
            return w_hCW
        kept = torch.empty_like(w_hCW).bernoulli_(1 - self.dropout_p, generator=self.generator)
        return w_hCW * kept.div_(1 - self.dropout_p)
