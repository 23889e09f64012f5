"""What stands in slots of padding is not read: outputs, gradients and states are the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subquad.attention import build
from subquad.ops.padding import Lengths
from subquad.testing import assert_exact, assert_same_maths

DIM, TOKENS = 12, 19
FORMS = [
    *((name, {"causal": causal}) for name in ("linear", "latte", "performer", "luna") for causal in (True, False)),
    *(("performer", {"kernel": "relu", "causal": causal}) for causal in (True, False)),
    *(("elita", {"self_term": term}) for term in ("slot", "diagonal")),
    ("linformer", {}),
]


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_slots_of_padding_hold_nothing(name: str, options: dict[str, object]) -> None:
    """Models compact rows once, so padded slots of later layers hold what earlier layers left there, not zeros."""
    torch.manual_seed(0)
    layer = build(name, dim=DIM, num_heads=3, bias=True, **options).double()
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    lengths = torch.tensor([TOKENS, 4, 0])
    real = torch.arange(TOKENS) < lengths[:, None]
    results = []
    for seed in (1, 2):
        rubbish = 1e6 * torch.randn(3, TOKENS, DIM, generator=torch.Generator().manual_seed(seed)).double()
        rows = torch.where(real[..., None], x, rubbish).requires_grad_()
        y, state = layer(rows, mask=Lengths(lengths))
        assert y.isfinite().all()
        gradient = torch.autograd.grad(y[real].square().sum(), rows)[0]
        results.append([y[real], gradient, *(entry for entry in state.entries.values() if isinstance(entry, Tensor))])
    for one, other in zip(*results, strict=True):
        assert_exact(one, other)
    for b, length in enumerate(lengths.tolist()):
        assert_same_maths(y[b, :length], layer(x[None, :length])[0][0], f"row of {length} tokens")
