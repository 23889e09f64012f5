"""Processes that have ended, and those that hang, are told apart."""

import logging
import time

import pytest
from torch.distributed import HashStore

from subquad.training.processes import Heartbeat


class Others(HashStore):
    """The store of a process whose others are made up: `alive` ones give another sign whenever they are looked at."""

    def __init__(self, places: dict[int, str], alive: set[int]) -> None:
        super().__init__()
        self.looks, self.alive = 0, alive
        for rank, place in places.items():
            self.set(f"beat/{rank}", f"1 {place}")

    def get(self, key: str) -> bytes:
        found = super().get(key)
        rank = int(key.rpartition("/")[2])
        if rank == 0 or rank not in self.alive:
            return found
        self.looks += 1
        return f"{self.looks} ".encode() + found.partition(b" ")[2]


def waiting(store: HashStore, world: int) -> Heartbeat:
    """Process 0, in its second place."""
    heart = Heartbeat(store, 0, world, timeout=0.8)
    heart.at("the forward pass of step 1")
    heart.at("the backward pass of step 1")
    return heart


def test_who_has_ended_and_who_is_behind() -> None:
    forward, backward = "1 the forward pass of step 1", "2 the backward pass of step 1"
    store = Others({1: forward, 2: forward, 3: backward}, alive={2, 3})
    heart = waiting(store, 5)
    assert heart.lost() == (
        "process 1 has ended or does not answer, last seen in the forward pass of step 1; "
        "process 2 does not come on from the forward pass of step 1; "
        "process 4 has ended or does not answer, last seen in no place"
    )
    heart.close()


def test_nobody_is_blamed_who_is_as_far_or_has_given_up_itself() -> None:
    store = Others({1: "2 the backward pass of step 1", 2: "1 the forward pass of step 1"}, alive={1})
    store.set("gave up/2", "1")
    heart = waiting(store, 3)
    assert heart.lost() is None
    assert store.check(["gave up/0"])
    heart.close()


def test_a_process_says_where_it_is() -> None:
    store = HashStore()
    heart = waiting(store, 1)
    end = time.monotonic() + 60
    while not store.check(["beat/0"]) or b"backward" not in store.get("beat/0"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert store.get("beat/0").split(b" ", 2)[1:] == [b"2", b"the backward pass of step 1"]
    heart.close()


def test_a_long_wait_names_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="subquad"):
        heart = waiting(Others({1: "0 the start"}, alive={1}), 2)
        end = time.monotonic() + 60
        while "waits in" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "process 0 waits in the backward pass of step 1: process 1 does not come on from the start" in caplog.text
    heart.close()


def test_a_store_that_is_gone_is_an_answer_too() -> None:
    class Gone(HashStore):
        def set(self, *args: object) -> None:
            raise RuntimeError("Connection reset by peer")

    heart = Heartbeat(Gone(), 0, 2, timeout=0.8)
    assert heart.lost() == "the store that process 0 or its torchrun holds does not answer: Connection reset by peer"
    heart.close()
