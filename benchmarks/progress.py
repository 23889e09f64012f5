"""How far a benchmark is, on standard error: a bar on a terminal that has rich, a line a step anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """`with Progress(3) as progress: progress.step("llp, 1,024 tokens")`, once for each of the steps."""

    def __init__(self, steps: int, *, shown: bool = True) -> None:
        self.steps, self.done, self.shown = steps, 0, shown
        self.start = time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            self.bar = _bar()

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, what: str) -> None:
        """The next step begins."""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=what)
        elif self.shown:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"[{self.done + 1}/{self.steps}, {seconds:.0f} s] {what}\n")
            sys.stderr.flush()
        self.done += 1

    def say(self, what: str) -> None:
        """What goes on inside a step: shown by a bar alone."""
        if self.bar is not None:
            self.bar.update(self.task, description=what)


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)
