"""The gated scan's walk over the chunks, cut into segments that run at the same time."""

from functools import partial

import pytest
import torch

from subquad import ops
from subquad.ops._triton import scan as module
from subquad.testing.tools import assert_exact, mask_with
from tests.ops.cases import DEVICE, assert_all_in_budget, differentiated, random, thinned

DECAYS = {"none": 0, "head": 1, "channel": 16}
TOKENS = 90
"""Three chunks of 32 tokens, the last of them short."""


def make(decay, groups=2):
    """Return q, i, v, the log decays and a state with sums of inputs."""
    draw = partial(random, dtype=torch.float32)
    q, i = (draw(1, groups, TOKENS, 16, seed=n).abs() for n in (1, 2))
    v, state = draw(1, 2, TOKENS, 20, seed=3), draw(1, 2, 16, 21, seed=5).abs()
    return [q, i, v, state, *([-0.1 * draw(1, 2, TOKENS, DECAYS[decay], seed=4).abs()] if DECAYS[decay] else [])]


def scan(backend, q, i, v, state, log_f=None, mask=None):
    return tuple(ops.gated_scan(q, i, v, log_f, state=state, mask=mask, normalise=True, eps=0.1, backend=backend))


@thinned(3, decay=DECAYS, per=(1, 2))
def test_segments_are_the_definition(decay, per, monkeypatch):
    monkeypatch.setattr(module, "chunks_per_segment", lambda *sizes: per)
    mask = mask_with([(33, 50, 7)]).to(DEVICE)  # a chunk of padding
    inputs = make(decay, groups=1 if decay == "head" else 2)
    actual, measured = (differentiated(lambda *x, b=b: scan(b, *x, mask=mask), inputs) for b in ("triton", "torch"))
    exact = differentiated(lambda *x: scan("reference", *x, mask=mask), [x.double() for x in inputs])
    assert_all_in_budget(actual, measured, exact, torch.float32)


@thinned(3, decay=("channel", "head", "none"))
def test_no_bit_of_a_segment_depends_on_later_tokens(decay, monkeypatch):
    monkeypatch.setattr(module, "chunks_per_segment", lambda *sizes: 1)
    q, i, v, *rest = make(decay)
    out = scan("triton", q, i, v, *rest)[0]
    for now in (31, 60):
        later = torch.arange(TOKENS, device=DEVICE)[:, None] > now
        changed = [torch.where(later, -1e4 * x, x) for x in (q, i, v)]
        assert_exact(scan("triton", *changed, *rest)[0][:, :, : now + 1], out[:, :, : now + 1])


@pytest.mark.parametrize(("programs", "chunks", "per"), [
    (32, 256, 32),  # 8 segments make 256 programs, one wave
    (128, 256, 256),  # half a wave: two segments, each walked over twice, save nothing
    (64, 256, 64), (8, 256, 8), (1, 1024, 16), (32, 32, 8), (32, 24, 24), (264, 4096, 4096), (0, 5, 5), (5, 0, 1),
])  # fmt: skip
def test_few_heads_and_many_chunks_are_cut(programs, chunks, per):
    assert module.chunks_per_segment(programs, chunks, 264) == per
