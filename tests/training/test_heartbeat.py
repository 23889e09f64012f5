"""Processes that have ended, and those that hang, are told apart."""

import logging
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from subquad.training.heartbeat import Heartbeat


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_has_ended_and_who_is_behind() -> None:
    store = HashStore()
    hearts = [Heartbeat(store, rank, 4, timeout=1.6) for rank in range(4)]
    for heart in hearts:
        heart.at("the forward pass of step 1")
    for rank in (0, 3):
        hearts[rank].at("the backward pass of step 1")
    until(lambda: all(store.check([f"beat/{rank}"]) and b"pass" in store.get(f"beat/{rank}") for rank in range(4)))
    hearts[1].close()
    lost = hearts[0].lost()
    assert lost == (
        "process 1 has ended or does not answer, last seen in the forward pass of step 1; "
        "process 2 does not come on from the forward pass of step 1"
    )
    hearts[2].at("the backward pass of step 1")
    hearts[1] = Heartbeat(store, 1, 4, timeout=1.6)
    hearts[1].at("the forward pass of step 1")
    hearts[1].at("the backward pass of step 1")
    until(lambda: b"backward" in store.get("beat/1") and b"backward" in store.get("beat/2"))
    assert hearts[3].lost() is None
    for heart in hearts:
        heart.close()


def test_a_process_that_gives_up_itself_is_not_blamed() -> None:
    store = HashStore()
    hearts = [Heartbeat(store, rank, 2, timeout=0.8) for rank in range(2)]
    hearts[0].at("step 1")
    store.set("gave up/1", "1")
    hearts[1].close()
    assert hearts[0].lost() is None
    hearts[0].close()


def test_a_long_wait_names_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with caplog.at_level(logging.WARNING, logger="subquad"):
        hearts = [Heartbeat(store, rank, 2, timeout=0.8) for rank in range(2)]
        hearts[0].at("the forward pass of step 1")
        until(lambda: "waits in" in caplog.text)
    assert "process 0 waits in the forward pass of step 1: process 1 does not come on from the start" in caplog.text
    for heart in hearts:
        heart.close()


def test_a_store_that_is_gone_is_an_answer_too() -> None:
    class Gone(HashStore):
        def set(self, *args: object) -> None:
            raise RuntimeError("Connection reset by peer")

    heart = Heartbeat(Gone(), 0, 2, timeout=0.8)
    assert heart.lost() == "the store that process 0 or its torchrun holds does not answer: Connection reset by peer"
    heart.close()
