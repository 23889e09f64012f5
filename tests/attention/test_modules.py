"""Mechanisms as ordinary modules: they copy, pickle, halve, and run on the meta device."""

import copy
import functools
import pickle

import pytest
import torch

from subquad.attention import build, mechanism, names
from subquad.ops import gated_scan
from subquad.testing import assert_exact, assert_same_maths, largest_allocation
from subquad.testing.tools import LINEAR_GROWTH


@pytest.mark.parametrize("name", names())
def test_copies_and_pickles_compute_the_same(name):
    layer, x = build(name, dim=8, num_heads=2).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        assert_exact(other(x)[0], layer(x)[0])


CAUSAL = [name for name in names() if "causal" in mechanism(name).forms]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_goes_on_in_another_precision(name):
    layer, x = build(name, dim=8, num_heads=2), torch.randn(2, 9, 8)
    state = layer(x)[1]
    y = layer.to(torch.bfloat16)(x.bfloat16(), state)[0]
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("name", names())
def test_shapes_are_known_without_numbers(name):
    with torch.device("meta"):
        y = build(name, dim=8, num_heads=2)(torch.empty(2, 9, 8))[0]
    assert y.shape == (2, 9, 8)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_of_another_batch_is_refused(name):
    layer = build(name, dim=8, num_heads=2)
    state = layer(torch.randn(1, 9, 8))[1]
    with pytest.raises(ValueError, match=f"the state holds 1 sequences but this {name} layer was given 3"):
        layer(torch.randn(3, 9, 8), state)


@pytest.mark.parametrize("decays", [1, 4])
def test_a_decay_of_minus_infinity_forgets_all(decays):
    q, i, v = (torch.rand(1, 2, 20, 4, dtype=torch.float64) for _ in range(3))
    log_f = torch.zeros(1, 2, 20, decays, dtype=torch.float64)
    log_f[:, :, 11] = -torch.inf
    out, state = gated_scan(q, i, v, log_f)
    fresh = gated_scan(q[:, :, 11:], i[:, :, 11:], v[:, :, 11:], None)
    assert_same_maths(out[:, :, 11:], fresh.out, "outputs")
    assert_same_maths(state, fresh.state, "state")


@pytest.mark.parametrize("name", ["longformer", "bigbird"])
def test_after_padding_memory_grows_as_the_tokens(name):
    """Keys at fixed places are found by each row's own positions, not by reading all keys."""
    layer, x = build(name, dim=8, num_heads=2), torch.randn(2, 4096, 8)
    mask, sizes = torch.ones(2, 64, dtype=torch.bool), []
    mask[0, :5] = False
    with torch.no_grad():
        state = layer(x[:, :64], mask=mask)[1]
        for tokens in (2048, 4096):
            sizes.append(largest_allocation(functools.partial(layer, x[:, :tokens], state)))
    assert sizes[1] < LINEAR_GROWTH * sizes[0], sizes


def test_decoding_compiles_once_for_many_lengths():
    layer, x = build("longformer", dim=8, num_heads=2, width=4, num_global=2), torch.randn(1, 40, 8)
    torch._dynamo.reset()
    step = torch.compile(lambda x, state: layer(x, state), fullgraph=True, backend="eager", dynamic=True)
    outputs = []
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4):
        state = layer(x[:, :10])[1]
        for t in range(10, 40):
            y, state = step(x[:, t : t + 1], state)
            outputs.append(y)
    assert torch.cat(outputs, 1).isfinite().all()
