"""Orders of an epoch: permutations that a seed and an epoch fix, stored or computed place by place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data import order as module
from subquad.data.order import EpochOrder, LargeOrder, epoch_order

seeds = st.integers(0, 2**63)


@pytest.mark.parametrize("kind", [EpochOrder, LargeOrder])
@settings(max_examples=50)
@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 5), data=st.data())
def test_an_order_is_a_permutation_fixed_by_seed_and_epoch_and_continues_exactly(kind, n, seed, epoch, data):
    whole, resumed, stop = kind(n, seed, epoch), kind(n, seed), data.draw(st.integers(0, n))
    iterator = iter(whole)
    first = [next(iterator) for _ in range(stop)]
    resumed.load_state_dict(whole.state_dict())
    resumed.set_epoch(epoch)
    items = first + list(resumed)
    assert resumed.position == len(whole) == n
    assert items == whole.permutation().tolist() == list(kind(n, seed, epoch))
    assert sorted(items) == sorted(resumed) == list(range(n)), "the iteration after the resumed one is whole"


def test_seeds_and_epochs_differ_and_orders_are_pinned_so_that_old_runs_resume():
    for kind in (EpochOrder, LargeOrder):
        assert len({tuple(kind(50, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert list(EpochOrder(10, seed=0, epoch=0)) == [6, 0, 1, 2, 4, 8, 9, 5, 7, 3]
    assert list(LargeOrder(10, seed=0, epoch=0)) == [3, 0, 5, 7, 8, 9, 4, 1, 2, 6]
    assert LargeOrder(10**9, 7, 3).at(np.array([0, 1, 10**9 - 1])).tolist() == [150603125, 557467192, 17069391]
    assert type(epoch_order(module.LARGE - 1, 3, 1)) is EpochOrder
    assert type(epoch_order(module.LARGE, 3, 1)) is LargeOrder


def test_another_epoch_begins_at_its_start_and_iterators_do_not_disturb_each_other():
    order = EpochOrder(10, seed=1)
    order.load_state_dict({"n": 10, "seed": 1, "epoch": 0, "position": 4})
    order.set_epoch(1)
    assert list(order) == list(EpochOrder(10, seed=1, epoch=1)) == order.permutation().tolist()
    assert list(zip(order, order, strict=True)) == [(item, item) for item in order.permutation().tolist()]


@settings(max_examples=50)
@given(st.integers(1, 10**12), seeds, st.data())
def test_any_place_is_computed_alone(n, seed, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    found = LargeOrder(n, seed).at(places)
    assert ((found >= 0) & (found < n)).all()
    assert len(set(found.tolist())) == len(places)
    assert [LargeOrder(n, seed).at(places[i : i + 1]).item() for i in range(len(places))] == found.tolist()


def test_blocks_change_nothing_and_neighbours_are_spread(monkeypatch):
    items = LargeOrder(1 << 14, 0).permutation().double()
    steps = (items[1:] - items[:-1]).abs().mean() / len(items)
    assert 0.31 < steps < 0.36, "a third of all items, as between any two numbers"
    expected = list(LargeOrder(100, 1))
    monkeypatch.setattr(module, "BLOCK", 7)
    assert list(LargeOrder(100, 1)) == expected


@pytest.mark.parametrize(("call", "message"), [
    (lambda order: order.load_state_dict(order.state_dict() | {"n": 11}), "order has n=11, not 10: data or seed cha"),
    (lambda order: order.load_state_dict(order.state_dict() | {"seed": 2}), "the saved order has seed=2, not 1"),
    (lambda order: order.load_state_dict(order.state_dict() | {"position": 11}), r"must lie in 0\.\.10, got 11"),
    (lambda order: order.at(np.array([-1])), r"places must lie in 0\.\.9, got -1 to -1"),
    (lambda order: order.at(np.array([3, 10])), r"places must lie in 0\.\.9, got 3 to 10"),
    (lambda order: EpochOrder(0), "an order needs at least one item, got n=0"),
])  # fmt: skip
def test_another_order_and_other_places_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(LargeOrder(10, seed=1))
