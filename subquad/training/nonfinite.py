"""Steps whose loss or gradient isn't finite: counted, left out or the end of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Skipped:
    """The steps of a run that were left out (`run.nonfinite=skip`)."""

    total: int = 0
    in_a_row: int = 0
    """Those just now, one after another."""

    def to_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Cause:
    """What was not finite in one process, and the windows of its part of the step."""

    rank: int
    what: str
    """`loss` or `gradient norm`."""
    value: float
    windows: list[int]

    def describe(self, step: int, processes: int) -> str:
        """For an error message."""
        where = f" in process {self.rank}" if processes > 1 and self.what == "loss" else ""
        return f"the {self.what} is {self.value} at step {step}{where}, in the batch of windows {self.windows}"
