"""RetNet, GLA and DeltaNet token by token in numpy, from their papers: no code in common with the library.

HGRN2, Mamba-2 and the mLSTM have such a loop in their own files, and Gated DeltaNet and Kimi Delta Attention are
compared with other libraries by `make peers`.
"""

import numpy as np
import pytest
import torch

from subquad.attention import build
from subquad.attention.recurrent import DecayRate
from subquad.ops import gated_scan
from subquad.ops.scan import FORGET_ALL
from subquad.testing import assert_exact, assert_same_maths

DIM, HEADS, TOKENS = 12, 3, 23


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def heads(x_TC):
    return x_TC.reshape(TOKENS, HEADS, -1)


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def retnet(w, x):
    """Section 2.1, equations 5 to 8: queries and keys are complex, turned by exp(i n theta)."""
    q, k, v = (heads(x @ w[f"{name}.weight"].T) for name in ("query", "key", "value"))
    half = q.shape[-1] // 2
    turn = np.exp(1j * np.arange(TOKENS)[:, None] * 10000.0 ** (-np.arange(half) / half))[:, None]
    q, k = ((z[..., :half] + 1j * z[..., half:]) * turn for z in (q, k))
    out = np.zeros(v.shape)
    for h in range(HEADS):
        S, g = 0.0, 1 - 2.0 ** (-5 - h)
        for n in range(TOKENS):
            S = g * S + np.outer(k[n, h].conj(), v[n, h])
            out[n, h] = (q[n, h] @ S).real / np.sqrt(2 * half)
    out -= out.mean(-1, keepdims=True)
    return rms(out).reshape(TOKENS, -1) * silu(x @ w["gating.weight"].T)


def gla(w, x):
    """Section 4.4 with equation 3: decays are sixteenth roots of sigmoids, one a key channel."""
    q, k, v = (heads(x @ w[f"{name}.weight"].T) for name in ("query", "key", "value"))
    logits = x @ w["decay_down.weight"].T @ w["decay_up.weight"].T + w["decay_up.bias"]
    alpha, out = heads(sigmoid(logits) ** (1 / 16)), np.zeros(v.shape)
    for h in range(HEADS):
        S = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(TOKENS):
            S = alpha[t, h][:, None] * S + np.outer(k[t, h], v[t, h])
            out[t, h] = q[t, h] @ S / np.sqrt(k.shape[-1])
    gate = silu(x @ w["gating.weight"].T + w["gating.bias"])
    return (rms(out) * w["norm_weight"]).reshape(TOKENS, -1) * gate


def delta_net(w, x):
    """Section 2.2: what the memory holds for a key is moved towards the value by beta."""
    channels = np.concatenate([x @ w[f"{name}.weight"].T for name in ("query", "key", "value")], 1)
    taps = w["convolution.weight"]
    before = np.concatenate([np.zeros((taps.shape[1] - 1, len(taps))), channels])
    mixed = silu(sum(before[j : j + TOKENS] * taps[:, j] for j in range(taps.shape[1])))
    q, k, v = (heads(part) for part in np.split(mixed, 3, axis=1))
    q, k = (z / np.sqrt((z**2).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
    beta, out = sigmoid(x @ w["strength.weight"].T), np.zeros(v.shape)
    for h in range(HEADS):
        S = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(TOKENS):
            held = k[t, h] @ S
            S = S - np.outer(k[t, h], held) + np.outer(k[t, h], beta[t, h] * v[t, h] + (1 - beta[t, h]) * held)
            out[t, h] = q[t, h] @ S / np.sqrt(k.shape[-1])
    return (rms(out) * w["norm_weight"]).reshape(TOKENS, -1)


@pytest.mark.parametrize("loop", [retnet, gla, delta_net])
def test_it_is_the_papers_recurrence_token_by_token(loop):
    torch.manual_seed(0)
    layer = build(loop.__name__, dim=DIM, num_heads=HEADS).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    w = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    expected = torch.from_numpy(loop(w, x.numpy()) @ w["out.weight"].T)
    assert_same_maths(layer(x[None])[0][0], expected, loop.__name__)


@pytest.mark.parametrize(
    ("a", "c", "decay"), [(100.0, -200.0, 0.0), (100.0, 5.0, FORGET_ALL), (1e30, 1e3, FORGET_ALL), (-1e30, 100.0, 0.0)]
)
def test_an_extreme_rate_is_no_infinity_times_zero(a, c, decay):
    rate = DecayRate(2)
    torch.nn.init.constant_(rate.log_rate, a)
    torch.nn.init.constant_(rate.step_bias, c)
    log_f, _ = rate(torch.zeros(1, 3, 2))
    x = torch.ones(1, 2, 3, 4)
    gated_scan(x, x, x, log_f).out.sum().backward()
    assert_exact(log_f.clamp(min=FORGET_ALL), torch.full_like(log_f, decay))
    assert rate.log_rate.grad.isfinite().all()
    assert rate.step_bias.grad.isfinite().all()
