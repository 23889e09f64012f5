"""Processes: settings that they can't follow, how they meet, how they share work, and how they tell who is lost."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from subquad.training import TrainConfig
from subquad.training.config import ParallelConfig
from subquad.training.errors import LostProcessError
from subquad.training.processes import FOREIGN, Heartbeat, Processes, check_parallel, join, leave, meet
from tests.training.helpers import raising

CONTEXT_4 = {"parallel": {"context": 4}}
STACK = {"parallel": {"context": 2}, "model": {"attention": "perceiver_ar"}}


@pytest.mark.parametrize(("name", "value", "config", "message"), [
    *((name, "true", {}, f"subquad train ignores {name}, which is true: unset it") for name in sorted(FOREIGN)),
    ("ACCELERATE_MIXED_PRECISION", "fp16", {}, r"which is fp16: unset it; run\.precision chooses the precision"),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", {}, "which is INDUCTOR: unset it; training is not compiled"),
    ("WORLD_SIZE", "6", CONTEXT_4, r"parallel\.context=4 must divide the number of processes, got 6"),
    ("WORLD_SIZE", "2", STACK, r"'perceiver_ar' can't share a window: parallel\.context must be 1"),
])  # fmt: skip
def test_an_environment_that_cannot_be_followed_is_refused(monkeypatch, name, value, config, message):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    check_parallel(TrainConfig())
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        check_parallel(TrainConfig.from_dict(config))


def test_ranks_and_parts_of_several_processes_and_of_one(caplog):
    places = [(p.data_rank, p.data_ranks, p.first) for p in (Processes(rank, 6, 2) for rank in range(6))]
    assert places == [(rank // 2, 3, rank == 0) for rank in range(6)]
    assert join(ParallelConfig(), "cpu") == Processes()
    leave()
    join(ParallelConfig(shard=True), "cpu")
    assert "parallel.shard has no effect with one process" in caplog.text


def start(store, world, order):
    """Let processes come in this order; return what each reads under a key that the first has set."""

    def come(rank):
        own = meet(store, rank, world, 60.0)
        if rank == 0:
            own.set("said", f"{own.add('starts', 1)}")
        return own.get("said")

    with ThreadPoolExecutor(world) as pool:
        return set(pool.map(come, order))


@hypothesis_settings(max_examples=25)
@given(data=st.data(), world=st.integers(1, 4), starts=st.integers(1, 3))
def test_each_start_has_a_part_of_the_store_for_itself(data, world, starts):
    store = HashStore()
    for _ in range(starts):
        assert start(store, world, data.draw(st.permutations(range(world)))) == {b"1"}


def test_processes_that_do_not_connect_are_named():
    store = HashStore()
    start(store, 4, [0, 1, 2, 3])
    with pytest.raises(LostProcessError, match=r"process 0 waited 0\.1 s; of 4 processes, 1, 2, 3 did not connect"):
        meet(store, 0, 4, 0.1)
    with pytest.raises(LostProcessError, match=r"process 1 waited 0\.1 s for process 0, which did not connect"):
        meet(store, 1, 2, 0.1)


def test_an_error_of_another_process_is_raised_with_its_rank(monkeypatch):
    monkeypatch.setattr(Processes, "gather_objects", lambda self, mine: [mine, None, OSError("no room")])
    with pytest.raises(OSError, match=r"^in process 2: no room$"), Processes(0, 3).together():
        pass


class Others(HashStore):
    """A store with made-up other processes: those in `alive` give another sign whenever they are looked at."""

    def __init__(self, places, alive):
        super().__init__()
        self.looks, self.alive = 0, alive
        for rank, place in places.items():
            self.set(f"beat/{rank}", f"1 {place}")

    def get(self, key):
        found = super().get(key)
        rank = int(key.rpartition("/")[2])
        if rank == 0 or rank not in self.alive:
            return found
        self.looks += 1
        return f"{self.looks} ".encode() + found.partition(b" ")[2]


@contextmanager
def waiting(store, world):
    """Give the heartbeat of process 0 in its second place."""
    heart = Heartbeat(store, 0, world, timeout=0.8)
    heart.at("the forward pass of step 1")
    heart.at("the backward pass of step 1")
    yield heart
    heart.close()


def wait_until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


FORWARD, BACKWARD = "1 the forward pass of step 1", "2 the backward pass of step 1"


def test_ended_processes_and_those_behind_are_told_apart():
    with waiting(Others({1: FORWARD, 2: FORWARD, 3: BACKWARD}, alive={2, 3}), 5) as heart:
        assert heart.lost() == (
            "process 1 has ended or does not answer, last seen in the forward pass of step 1; "
            "process 2 hangs in the forward pass of step 1; "
            "process 4 has ended or does not answer, last seen in no place"
        )


def test_nobody_is_blamed_who_is_as_far_or_has_given_up_itself():
    store = Others({1: BACKWARD, 2: FORWARD}, alive={1})
    store.set("gave up/2", "1")
    with waiting(store, 3) as heart:
        assert heart.lost() is None
    assert store.check(["gave up/0"])


def test_a_long_wait_names_who_is_waited_for(caplog):
    caplog.set_level(logging.WARNING, logger="subquad")
    with waiting(Others({1: "0 the start"}, alive={1}), 2):
        wait_until(lambda: "waits in" in caplog.text)
    assert "process 0 waits in the backward pass of step 1: process 1 hangs in the start" in caplog.text


def test_a_store_that_is_gone_is_an_answer_too(monkeypatch):
    monkeypatch.setattr(HashStore, "set", raising(RuntimeError("Connection reset by peer")))
    with waiting(HashStore(), 2) as heart:
        assert heart.lost() == "the store of process 0 or its torchrun does not answer: Connection reset by peer"
