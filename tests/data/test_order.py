"""Orders of an epoch: permutations that a seed and an epoch fix, stored or computed place by place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import order as module
from subquad.data.order import LargeOrder, epoch_order

seeds = st.integers(0, 2**63)


@pytest.mark.parametrize("kind", [epoch_order, LargeOrder])
@settings(max_examples=50)
@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 5))
def test_an_order_is_a_permutation_fixed_by_seed_and_epoch(kind, n, seed, epoch):
    items = list(kind(n, seed, epoch))
    assert items == list(kind(n, seed, epoch))
    assert sorted(items) == list(range(n))


def test_seeds_and_epochs_differ_and_orders_are_pinned_so_that_old_runs_resume():
    for kind in (epoch_order, LargeOrder):
        assert len({tuple(kind(50, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert list(epoch_order(10, 0, 0)) == [6, 0, 1, 2, 4, 8, 9, 5, 7, 3]
    assert list(LargeOrder(10, seed=0, epoch=0)) == [3, 0, 5, 7, 8, 9, 4, 1, 2, 6]
    assert LargeOrder(10**9, 7, 3).at(np.array([0, 1, 10**9 - 1])).tolist() == [150603125, 557467192, 17069391]
    assert type(epoch_order(module.LARGE, 3, 1)) is LargeOrder


@settings(max_examples=50)
@given(st.integers(1, 10**12), seeds, st.data())
def test_any_place_is_computed_alone(n, seed, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    found = LargeOrder(n, seed).at(places)
    assert ((found >= 0) & (found < n)).all()
    assert len(set(found.tolist())) == len(places)
    assert [LargeOrder(n, seed).at(places[i : i + 1]).item() for i in range(len(places))] == found.tolist()


def test_blocks_change_nothing_and_neighbours_are_spread(monkeypatch):
    items = np.array(list(LargeOrder(1 << 14, 0)), dtype=float)
    steps = np.abs(np.diff(items)).mean() / len(items)
    assert 0.31 < steps < 0.36, "a third of all items, as between any two numbers"
    expected = list(LargeOrder(100, 1))
    monkeypatch.setattr(module, "BLOCK", 7)
    assert list(LargeOrder(100, 1)) == expected


@pytest.mark.parametrize(("call", "message"), [
    (lambda: LargeOrder(10).at(np.array([-1])), r"places must lie in 0\.\.9, got -1 to -1"),
    (lambda: LargeOrder(10).at(np.array([3, 10])), r"places must lie in 0\.\.9, got 3 to 10"),
    (lambda: epoch_order(0, 0, 0), "an order needs at least one item, got n=0"),
])  # fmt: skip
def test_no_items_and_other_places_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
