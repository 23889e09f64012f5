"""What `subquad probe` is asked to do, checked without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subquad.data.config import ProbeConfig

TaskName = Literal["passkey", "mqar", "copy", "position"]
DEPTHS = 5


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The command's options after parsing."""

    task: TaskName | None
    """None: what the runs were trained on."""
    lengths: tuple[int, ...]
    """Empty: the length in training, twice and four times as many tokens."""
    depths: tuple[float, ...]
    depths_given: bool
    samples: int
    seed: int
    batch_size: int
    digits: int | None
    pairs: int | None
    text: str | None
    cache: str | None
    device: str

    def changed(self, probe: ProbeConfig) -> ProbeConfig:
        """The probe of a run with --digits and --pairs; strings to copy are as long as they can be.

        Raises `ValueError` for one that the probe has not.
        """
        for name, where in (("digits", "passkey"), ("pairs", "mqar")):
            value = getattr(self, name)
            if value is not None and probe.name != where:
                raise ValueError(f"--{name} is for the probe {where}, and the run's is {probe.name}; leave it out")
            if value is not None:
                probe = probe.replace(**{name: value})
        return probe.replace(shortest=None)


def read_lengths(text: str | None) -> tuple[int, ...]:
    """`128,256,512` as numbers, in order, each once. Raises `ValueError` for anything else."""
    if text is None:
        return ()
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ValueError(f"lengths are numbers of tokens between commas, as 128,256,512, got {text!r}") from error
    if lengths[0] < 1:
        raise ValueError(f"lengths must be at least 1, got {lengths[0]}")
    return tuple(lengths)


def read_depths(text: str | None) -> tuple[float, ...]:
    """`5` as five depths from 0 to 1, evenly spaced; `0,0.5,1` or `0.5` as they are; `1` is the middle alone."""
    try:
        if text is None or not set(text) & set(".,"):
            count = DEPTHS if text is None else int(text)
            if count < 1:
                raise ValueError(f"there must be at least 1 depth, got {count}")
            return tuple(i / (count - 1) for i in range(count)) if count > 1 else (0.5,)
        depths = sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        if "could not convert" not in str(error) and "invalid literal" not in str(error):
            raise
        raise ValueError(f"depths are a number of them, or depths between commas, as 0,0.5,1, got {text!r}") from error
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth must lie between 0 (the start) and 1 (the end), got {depth}")
    return tuple(depths)
