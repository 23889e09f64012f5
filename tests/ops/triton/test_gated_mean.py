"""The gated mean's kernels apart from the laws of all scans (test_scan.py): launches, tiles of blocks, dropout."""

from functools import partial

import pytest
import torch

from subquad.ops._triton import common
from subquad.ops._triton import gated_mean as module
from subquad.ops._triton.gated_mean import gated_mean, gated_mean_backward_op, gated_mean_op
from subquad.ops.softmax import gated_mean as engine
from subquad.testing.tools import assert_exact
from tests.ops.cases import (
    ALONE,
    DEVICE,
    assert_all_exact,
    assert_all_in_budget,
    differentiated,
    plain_gated_mean,
    random,
)

FP32 = torch.float32


def make(tokens, V=16):
    """Return gate, logits and v, then the tensors of a state: lse and mean."""
    shapes = (1, 1, tokens, 1), (1, 1, tokens, 1), (1, 1, tokens, V), (1, 1, 1), (1, 1, 1, V)
    return [random(*shape, seed=n, dtype=torch.float64 if n == 3 else FP32) for n, shape in enumerate(shapes)]


def kernels(gate, k, v, a, s, factors=None):
    return gated_mean(gate, k, v, factors, (a, s), None)


def assert_is_plain(inputs, **options):
    """Assert that results and gradients are those of every weight, and return them."""
    forms = partial(kernels, **options), partial(plain_gated_mean, **options)
    found = [differentiated(f, inputs) for f in forms]
    assert_all_in_budget(*found, differentiated(forms[1], [x.double() for x in inputs]), FP32)
    return found[0]


def test_states_pass_from_tile_to_tile_of_blocks(monkeypatch):
    monkeypatch.setattr(module, "STATE_BLOCKS", 16)
    assert_is_plain(make(17 * module.FLOAT32_BLOCK + 3))


@pytest.mark.parametrize("tokens", [2, 90])
def test_three_launches_and_three_backward_at_any_length(tokens, monkeypatch):
    launched, launch = [], common.launch
    monkeypatch.setattr(common, "launch", lambda kernel, *x, **y: launched.append(kernel) or launch(kernel, *x, **y))
    differentiated(kernels, make(tokens))
    assert len(launched) == 6


def test_the_same_call_twice_gives_the_same_bits():
    inputs = make(90, V=40)
    assert_all_exact(differentiated(kernels, inputs), differentiated(kernels, inputs))


@pytest.mark.parametrize("tokens", [1, 40])
def test_factors_of_the_two_weights(tokens):
    inputs, factors = make(tokens), random(1, 1, tokens, 2, seed=7, dtype=FP32).sign().relu() * 1.25
    results = assert_is_plain(inputs, factors=factors)
    assert_all_exact(kernels(*inputs, factors), results[:3])


def test_dropout_draws_a_factor_for_each_weight():
    inputs = make(40)[:3]
    torch.manual_seed(0)
    factors = torch.nn.functional.dropout(torch.ones(1, 1, 40, 2, device=DEVICE), 0.5)
    assert factors.unique().tolist() == [0.0, 2.0]
    torch.manual_seed(0)
    actual = engine(*inputs, dropout_p=0.5, backend="triton").out
    assert_exact(actual, gated_mean(*inputs, factors, None, None)[0])


def test_the_operations_keep_torchs_rules():
    *inputs, a, s = make(3)
    mask, factors = torch.ones(1, 3, dtype=torch.bool, device=DEVICE), torch.ones(1, 1, 3, 2, device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in (*inputs, a, s)]
    torch.library.opcheck(gated_mean_op, (*leaves[:3], factors, mask, *leaves[3:], True))
    torch.library.opcheck(gated_mean_op, (*inputs, None, None, None, None, False), test_utils=ALONE)
    one = [x[:, :, :1] for x in inputs]
    torch.library.opcheck(gated_mean_op, (*one, None, None, a, s, False), test_utils=ALONE)
    out, *ends = gated_mean_op(*inputs, factors, mask, a, s, True)
    arguments = (torch.ones_like(out), torch.ones_like(a), None, *inputs, factors, mask, a, s, *ends)
    torch.library.opcheck(gated_mean_backward_op, arguments, test_utils=ALONE)
