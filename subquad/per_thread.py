"""Values that hold within a block, in the thread that entered it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def held_by_thread(held: dict[int, T], value: T) -> Iterator[None]:
    """Hold `value` under this thread's number within the block, then what was held before, if anything.

    Compiled code can read a dict, but no `ContextVar`, and an empty one costs nothing to ask.
    """
    thread = threading.get_ident()
    before = held.get(thread)
    held[thread] = value
    try:
        yield
    finally:
        if before is None:
            del held[thread]
        else:
            held[thread] = before
