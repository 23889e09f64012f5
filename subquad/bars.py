"""Bars of progress and signs of waiting on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

T = TypeVar("T")
READING = "reading the model"


@contextmanager
def counter(unit: str = "", console: Console | None = None) -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a function that shows a bar `WHAT DONE/ALL UNIT` within the block; None if the console is no terminal.

    The console is standard error by default. Standard output stays as it is: rich would move it to the bar's console.
    """
    shown = console or Console(stderr=True)
    if not shown.is_terminal:
        yield None
        return
    bar_column = BarColumn(bar_width=None, table_column=Column(max_width=40))  # what the texts leave of the line
    numbers = MofNCompleteColumn(table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), bar_column, numbers, TextColumn(unit))
    with Progress(*columns, TimeRemainingColumn(), console=shown, redirect_stdout=False) as bar:
        bars: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = bar.add_task(what)
            bar.update(bars[what], completed=done, total=total)

        yield show


@contextmanager
def progress(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that shows a bar `WHAT DONE/ALL` within the block, as `counter` does."""
    with counter(console=console) as show:
        yield show and partial(show, what)


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[None]:
    """Show `WHAT` with a moving sign within the block, for what has no parts to count; nothing if it is no terminal."""
    shown = console or Console(stderr=True)
    with shown.status(what) if shown.is_terminal else nullcontext():
        yield


def counted(what: str, items: Collection[T]) -> Iterator[T]:
    """Yield `items`, with a bar `WHAT DONE/ALL` that counts those that the caller has worked on."""
    if not items:
        return
    with progress(what) as show:
        for done, item in enumerate(items):
            if show:
                show(done, len(items))
            yield item
        if show:
            show(len(items), len(items))
