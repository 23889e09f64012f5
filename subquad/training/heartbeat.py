"""Which process of a run has ended or does not come on: each tells the others that it lives, and where it is.

A thread of each process writes to the store of torch.distributed every `interval` seconds how often it has done so and
the last place that `at` named. Steps are not slowed down: naming a place only sets an attribute.
"""

from __future__ import annotations

import logging
import threading
import time

from torch import distributed

logger = logging.getLogger(__name__)

LONGEST_INTERVAL = 5.0
"""Seconds between two signs of life; an eighth of the time-out where that is less."""
PATIENCE = 3
"""Intervals without a sign of life after which a process counts as ended."""


class Heartbeat:
    """The signs of life of one of `world` processes. `timeout` is how long a collective may wait, in seconds."""

    def __init__(self, store: distributed.Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.interval = min(LONGEST_INTERVAL, timeout / 8)
        self._patience = timeout - 2 * PATIENCE * self.interval
        self._place = (0, "the start")
        self._since = time.monotonic()
        self._told = False
        self._before: tuple[int, list[tuple[int, int, str]]] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="subquad heartbeat", daemon=True)
        self._thread.start()

    def at(self, place: str) -> None:
        """Say what this process does now. All processes name the same places in the same order."""
        self._place = (self._place[0] + 1, place)
        self._since = time.monotonic()
        self._told = False

    def lost(self) -> str | None:
        """Which processes have ended or are behind this one, for an error message; None where all are where this is.

        Takes a few intervals. For a process whose wait for others has failed: it counts as alive for the others then.
        """
        try:
            self.store.set(f"gave up/{self.rank}", "1")
            before = self._read()
            time.sleep(PATIENCE * self.interval)
            return self._named(before)
        except RuntimeError as error:  # torch.distributed's errors are all of them
            return f"the store that process 0 or its torchrun holds does not answer: {error}"

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(2 * LONGEST_INTERVAL)

    def _named(self, before: list[tuple[int, int, str]]) -> str | None:
        """The processes that have given no sign since `before`, and those that are behind this one."""
        parts = []
        for rank, (beats, number, place) in enumerate(self._read()):
            if rank == self.rank or self.store.check([f"gave up/{rank}"]):
                continue
            if beats == before[rank][0]:
                parts.append(f"process {rank} has ended or does not answer, last seen in {place}")
            elif number < self._place[0]:
                parts.append(f"process {rank} does not come on from {place}")
        return "; ".join(parts) or None

    def _read(self) -> list[tuple[int, int, str]]:
        """Of each process its signs of life, and the number and name of its place."""
        found = []
        for rank in range(self.world):
            key = f"beat/{rank}"
            beats, number, place = (
                self.store.get(key).decode().split(" ", 2) if self.store.check([key]) else ("0", "0", "no place")
            )
            found.append((int(beats), int(number), place))
        return found

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(self.interval if beats else 0):
            beats += 1
            number, place = self._place
            try:
                self.store.set(f"beat/{self.rank}", f"{beats} {number} {place}")
                self._tell(beats)
            except RuntimeError:
                logger.debug("no sign of life can be given any more", exc_info=True)
                return

    def _tell(self, beats: int) -> None:
        """Name who is waited for before the time is up: NCCL ends a process without an exception."""
        if self._told or time.monotonic() - self._since < self._patience:
            self._before = None
        elif self._before is None:
            self._before = (beats, self._read())
        elif beats - self._before[0] >= PATIENCE:
            self._told = True
            if lost := self._named(self._before[1]):
                logger.warning("process %d waits in %s: %s", self.rank, self._place[1], lost)
