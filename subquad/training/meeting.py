"""How the processes of one start find each other in a store that may still hold what an earlier start has said.

torchrun keeps one store over `--max-restarts`. Addresses of processes that are gone would be taken for those of the new
ones, and counters would go on. So each start gets a name of its own, under which all that it says is kept: process 0
makes it up and gives it to every other process that is really there, which is one that answers.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from subquad.training.errors import LostProcessError

if TYPE_CHECKING:
    from torch.distributed import Store

PAUSE = 0.01
"""Seconds between two looks at the store."""


def meet(store: Store, rank: int, world: int, timeout: float) -> Store:
    """The part of `store` that belongs to this start of `world` processes alone, the same for all of them.

    Raises:
        LostProcessError: where others have not come after `timeout` seconds, with their ranks.

    """
    from torch.distributed import PrefixStore

    me = secrets.token_hex(16)
    if rank == 0:
        _welcome(store, me, world, timeout)
        return PrefixStore(me, store)
    store.set(f"subquad/here/{rank}", me)
    try:
        store.wait([f"subquad/welcome/{me}"], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LostProcessError(f"process {rank} waited {timeout:g} s for process 0, which has not come") from error
    name = store.get(f"subquad/welcome/{me}").decode()
    store.set(f"subquad/in/{name}/{rank}", "")
    return PrefixStore(name, store)


def _welcome(store: Store, name: str, world: int, timeout: float) -> None:
    """Tell the name to whoever says to be here, until each of the others has answered."""
    end = time.monotonic() + timeout
    told: set[bytes] = set()
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if store.check([f"subquad/here/{rank}"]):
                who = store.get(f"subquad/here/{rank}")  # of an earlier start, or of this one
                if who not in told:
                    told.add(who)
                    store.set(f"subquad/welcome/{who.decode()}", name)
        missing = {rank for rank in missing if not store.check([f"subquad/in/{name}/{rank}"])}
        if missing and time.monotonic() > end:
            ranks = ", ".join(map(str, sorted(missing)))
            raise LostProcessError(f"process 0 waited {timeout:g} s for {ranks} of {world} processes, not come yet")
        if missing:
            time.sleep(PAUSE)
