import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.data import order
from subquad.data.order import EpochOrder, LargeOrder, epoch_order
from subquad.testing import assert_exact

seeds = st.integers(0, 2**63)


@given(st.integers(1, 3000), seeds, st.integers(0, 5))
def test_a_large_order_is_a_permutation_that_seed_and_epoch_fix(n, seed, epoch):
    found = LargeOrder(n, seed, epoch)
    items = list(found)
    assert sorted(items) == list(range(n))
    assert items == found.permutation().tolist() == list(LargeOrder(n, seed, epoch))
    assert len(found) == n


@given(st.integers(1, 10**12), seeds, st.data())
def test_any_place_is_computed_alone(n, seed, data):
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    found = LargeOrder(n, seed).at(places)
    assert ((found >= 0) & (found < n)).all()
    assert len(set(found.tolist())) == len(places)
    assert [LargeOrder(n, seed).at(places[i : i + 1]).item() for i in range(len(places))] == found.tolist()


def test_seeds_and_epochs_differ():
    orders = {tuple(LargeOrder(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_large_order_is_pinned():
    """A run that is gone on with years later reads the same windows."""
    assert list(LargeOrder(10, seed=0, epoch=0)) == [3, 0, 5, 7, 8, 9, 4, 1, 2, 6]
    assert LargeOrder(10**9, 7, 3).at(np.array([0, 1, 10**9 - 1])).tolist() == [150603125, 557467192, 17069391]


def test_neighbours_are_spread():
    n = 1 << 14
    items = LargeOrder(n, 0).permutation().double()
    steps = (items[1:] - items[:-1]).abs().mean() / n
    assert 0.31 < steps < 0.36, "a third of all items, as between any two numbers"


@given(st.integers(1, 60), st.data())
def test_a_stopped_large_order_goes_on_exactly(n, data):
    stop = data.draw(st.integers(0, n))
    whole = LargeOrder(n, 5, 2)
    iterator = iter(whole)
    first = [next(iterator) for _ in range(stop)]
    resumed = LargeOrder(n, 5)
    resumed.load_state_dict(whole.state_dict())
    assert first + list(resumed) == list(LargeOrder(n, 5, 2))


def test_blocks_change_nothing(monkeypatch):
    expected = list(LargeOrder(100, 1))
    monkeypatch.setattr(order, "BLOCK", 7)
    assert list(LargeOrder(100, 1)) == expected


def test_small_sets_keep_the_order_that_they_had():
    small, large = epoch_order(order.LARGE - 1, 3, 1), epoch_order(order.LARGE, 3, 1)
    assert type(small) is EpochOrder
    assert type(large) is LargeOrder
    assert_exact(epoch_order(100, 3, 1).permutation(), EpochOrder(100, 3, 1).permutation())


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_that_is_not_there(place):
    with pytest.raises(ValueError, match=rf"places must lie in 0\.\.9, got {place} to {place}"):
        LargeOrder(10).at(np.array([place]))
