"""Shared by the engines' tests: random tensors, gradients, comparisons of all results, and parameters mostly slow."""

import os
from functools import partial
from itertools import product

import pytest
import torch

from subquad.ops import patterns
from subquad.ops.patterns.sparse import Columns
from subquad.testing.tools import assert_exact, assert_in_budget, assert_same_maths

PATTERNS = [
    patterns.Causal(), patterns.Full(), patterns.Window(width=5), patterns.Window(width=1), patterns.Window(width=20),
    patterns.Window(width=100), patterns.Segments(size=7, back=2), patterns.Segments(size=8),
    patterns.Segments(size=16, back=0), patterns.Segments(size=100), patterns.Prefix(length=13),
    patterns.Prefix(length=0), patterns.Suffix(start=13), patterns.Prefix(length=100), patterns.Band(before=3, after=9),
    patterns.Suffix(start=0), patterns.Band(before=30, after=0), patterns.Suffix(start=90),
    patterns.Shifted(size=8, shift=3, back=1), patterns.Shifted(size=16, shift=8),
    patterns.Blocks(size=8, back=1, ahead_blocks=1), patterns.Blocks(size=9), patterns.Sinks(count=3, back=4),
    patterns.Sinks(count=1, back=1, size=8), patterns.SinkTokens(count=11, back=1, size=8, offset=3),
    patterns.Globals(count=3, back=4, ahead_blocks=2),
    patterns.Globals(count=1, back=1, ahead_blocks=1, size=8), patterns.Random(size=8, index=1, of=2, skip=1, back=0),
    patterns.Random(size=8, index=0, of=2, skip=1, back=0, blocks=9), patterns.Dilated(width=4, dilation=3),
    patterns.DilatedBand(before=2, after=1, dilation=3), patterns.Strided(stride=5), Columns(size=8, last=3),
]  # fmt: skip
"""Every kind of pattern, for sequences of some 20 to 100 tokens."""


def shared_patterns():
    """Return the kinds that mechanisms share; those of one mechanism's file are tested by its contract."""
    return [kind for kind in patterns.Pattern.registry.values() if kind.__module__.startswith("subquad.ops.patterns")]


LAYOUTS = {
    "heads inside tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.shape[-1]],
    "channels apart": lambda x: x.mT.contiguous().mT,
    "one token for all": lambda x: x[:, :, :1].expand_as(x),
    "one channel for all": lambda x: x[..., :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
}
"""Strides that `[B, H, T, .]` tensors may have; contents change where one entry stands for all."""

ALONE = ("test_schema", "test_faketensor")
"""Torch's rules for an operator that nothing is differentiated through."""


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Return random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the kernels run: on a GPU, or in Triton's interpreter."""
random = partial(normal, device=DEVICE)


def differentiated(f, inputs):
    """Return the outputs of `f`, then the gradients of a fixed random projection of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = list(f(*leaves))
    total = sum(
        # An lse of -inf is a constant; it stays out of the projection.
        (y.masked_fill(torch.isneginf(y), 0.0) * normal(*y.shape, seed=100 + n, dtype=y.dtype, device=y.device)).sum()
        for n, y in enumerate(outputs)
    )
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


def assert_all_exact(actual, expected, what=""):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_exact(a, e, f"result {n}, {what}")


def assert_all_same_maths(actual, expected, what=""):
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_same_maths(a, e, f"result {n}, {what}")


def assert_all_in_budget(actual, plain, exact, dtype, what=""):
    for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert_in_budget(a, p, e, dtype, f"result {n}, {what}")


def thinned(every, **axes):
    """Parametrize with all combinations; all but one in `every` are slow.

    On a GPU, where kernels are not interpreted, none is slow.
    """
    parameters = []
    for places in product(*(range(len(values)) for values in axes.values())):
        values = [list(values)[n] for n, values in zip(places, axes.values(), strict=True)]
        slow = os.environ.get("TRITON_INTERPRET") == "1" and sum(places) % every
        name = "-".join(str(value).removeprefix("torch.") for value in values)
        parameters.append(pytest.param(*values, marks=pytest.mark.slow if slow else (), id=name))
    return pytest.mark.parametrize(tuple(axes), parameters)


def plain_delta(q, k, v, beta, log_f=None):
    """Return the outputs of the delta scan from every weight, in float32 or in the dtype of the inputs if wider."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    wide = torch.promote_types(v.dtype, torch.float32)
    G_BHTF = torch.zeros_like(q[..., :1]) if log_f is None else log_f.cumsum(2)
    decay_BHTSF = (G_BHTF[:, :, :, None] - G_BHTF[:, :, None]).clamp(max=0).exp()
    scores, system = ((x[:, :, :, None] * k[:, :, None] * decay_BHTSF).sum(-1).tril(-n) for x, n in ((q, 0), (k, 1)))
    u = torch.linalg.solve_triangular((beta * system).to(wide), (beta * v).to(wide), upper=False, unitriangular=True)
    return (scores @ u.to(v.dtype),)


def delta_by_token(q, k, v, beta):
    """Return the outputs of the delta scan without decays, token by token, in the dtype of the inputs."""
    state_BHKV, out = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[2]):
        error_BH1V = v[:, :, t : t + 1] - k[:, :, t : t + 1] @ state_BHKV
        state_BHKV = state_BHKV + k[:, :, t, :, None] * (beta[:, :, t, :, None] * error_BH1V)
        out.append(q[:, :, t : t + 1] @ state_BHKV)
    return (torch.cat(out, 2),)


def plain_scan(q, i, v, log_f=None, state=None, *, normalise=False, eps=0.0):
    """Return the outputs and the state of the gated scan from every weight, in the dtype of the inputs."""
    q, i = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, i))
    G_BHTF = torch.zeros_like(q[..., :1]) if log_f is None else log_f.cumsum(2)
    future_TS1 = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)[..., None]
    decay_BHTSF = (G_BHTF[:, :, :, None] - G_BHTF[:, :, None]).masked_fill(future_TS1, -torch.inf).exp()
    w_BHTS = (q[:, :, :, None] * i[:, :, None] * decay_BHTSF).sum(-1)
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalise else v
    out, after = w_BHTS @ v, (i * decay_BHTSF[:, :, -1]).mT @ v
    if state is not None:
        out = out + (q * G_BHTF.exp()) @ state.to(q.dtype)
        after = after + state * G_BHTF[:, :, -1, :, None].exp()
    return (out[..., :-1] / (out[..., -1:] + eps) if normalise else out), after


def plain_value_scan(q, i, v, log_g):
    """Return the outputs of the gated scan with decays of the value channels from every weight of each."""
    q, i = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, i))
    G_BHTV = log_g.cumsum(2)
    decay_BHTSV = (G_BHTV[:, :, :, None] - G_BHTV[:, :, None]).clamp(max=0).exp()
    return (torch.einsum("bhts,bhtsv,bhsv->bhtv", (q @ i.mT).tril(), decay_BHTSV, v),)


def plain_softmax(p, logits, v, a=None, s=None, *, mask=None):
    """Return results of the running softmax from every weight, in the dtype of the inputs.

    A state is one token more, with a value of its own for each latent.
    """
    if mask is not None:
        fills = (0.0, -torch.inf, 0.0)
        p, logits, v = (x.masked_fill(~mask[:, None, :, None], y) for x, y in zip((p, logits, v), fills, strict=True))
    T, L, V = v.shape[2], p.shape[3], v.shape[3]
    k_BHSL = logits if a is None else torch.cat([a[:, :, None].to(logits.dtype), logits], 2)
    S = k_BHSL.shape[2]
    future_TS1 = torch.ones(T, S, dtype=torch.bool, device=v.device).triu(1 + S - T)[..., None]
    k_BHTSL = k_BHSL[:, :, None].expand(-1, -1, T, -1, -1).masked_fill(future_TS1, -torch.inf)
    v_BHLSV = v[:, :, None].expand(-1, -1, L, -1, V)
    v_BHLSV = v_BHLSV if s is None else torch.cat([s[:, :, :, None].to(v.dtype), v_BHLSV], 3)
    means_BHLTV = k_BHTSL.softmax(3).permute(0, 1, 4, 2, 3).to(v.dtype) @ v_BHLSV
    lse_BHTL = k_BHTSL.logsumexp(3)
    out = torch.einsum("bhtl,bhltv->bhtv", p.to(v.dtype), means_BHLTV)
    return out, lse_BHTL, lse_BHTL[:, :, -1], means_BHLTV[:, :, :, -1]


def plain_gated_mean(gate, logits, v, a=None, s=None, *, mask=None, factors=None):
    """Return results of the gated mean from every weight, in the dtype of the inputs."""
    mean, lse, *after = plain_softmax(torch.ones_like(logits), logits, v, a, s, mask=mask)
    padding = torch.zeros((), dtype=torch.bool, device=v.device) if mask is None else ~mask[:, None, :, None]
    g, h = (gate + lse).sigmoid(), (-gate - lse).sigmoid()
    g, h = (g, h) if factors is None else (g * factors[..., :1], h * factors[..., 1:])
    out = g.to(v.dtype) * mean + h.to(v.dtype) * v.masked_fill(padding, 0.0)
    return out.masked_fill(padding, 0.0), *after
