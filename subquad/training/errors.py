"""Errors that stop a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a weight is infinite or not a number; the optimizer has not stepped on it."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or was made by other settings."""


class ReadError(OSError):
    """A process that reads the training data died, or did not answer in time."""


class FormatVersionError(CheckpointError):
    """A checkpoint has a format version that this release can't read."""


class SaveError(OSError):
    """A checkpoint or the final model could not be written; what was there before is as it was."""


class LostProcessError(ConnectionError):
    """Another process of the run has ended, or does not come on."""


class StepMemoryError(MemoryError):
    """A training step needs more memory than there is."""


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Around what reads files of others' formats: whatever damage raises there is a `CheckpointError` with `place`."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{place} cannot be read: {error!r}") from error
