"""Processes of one start find each other, whatever an earlier start has left in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from subquad.training.errors import LostProcessError
from subquad.training.processes import meet


def start(store: HashStore, world: int, order: list[int]) -> set[bytes]:
    """Processes that come in this order; what each reads under a key that the first has set."""

    def come(rank: int) -> bytes:
        own = meet(store, rank, world, 60.0)
        if rank == 0:
            own.set("said", f"{own.add('starts', 1)}")
        return own.get("said")

    with ThreadPoolExecutor(world) as pool:
        return set(pool.map(come, order))


@given(data=st.data(), world=st.integers(1, 5), starts=st.integers(1, 3))
def test_each_start_has_a_part_of_the_store_for_itself(data: st.DataObject, world: int, starts: int) -> None:
    store = HashStore()
    for _ in range(starts):
        order = data.draw(st.permutations(range(world)))
        assert start(store, world, order) == {b"1"}


def test_who_has_not_come_is_named() -> None:
    store = HashStore()
    start(store, 4, [0, 1, 2, 3])
    with pytest.raises(LostProcessError, match=r"process 0 waited 0\.1 s for 1, 2, 3 of 4 processes, not come yet"):
        meet(store, 0, 4, 0.1)


def test_process_0_has_not_come() -> None:
    store = HashStore()
    start(store, 2, [0, 1])
    with pytest.raises(LostProcessError, match=r"process 1 waited 0\.1 s for process 0, which has not come"):
        meet(store, 1, 2, 0.1)
