"""Errors that stop a training run."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a weight is infinite or NaN; the optimizer has not used it."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or was made with other settings."""


class ReadError(OSError):
    """A data worker died or did not answer in time."""


class FormatVersionError(CheckpointError):
    """A checkpoint has a format version that this release can't read."""


class SaveError(OSError):
    """A checkpoint or the final model could not be written; earlier files are untouched."""


class LostProcessError(ConnectionError):
    """Another process of the run has ended or hangs."""


class StepMemoryError(MemoryError):
    """A training step ran out of memory."""


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Raise any error inside the block, except `OSError` of the disk, as a `CheckpointError` that names `place`."""
    try:
        yield
    except Exception as error:
        # PyTorch's reader seeks to an invalid place in an archive that was cut.
        cut = isinstance(error, OSError) and error.errno == errno.EINVAL and error.filename is None
        if isinstance(error, CheckpointError | OSError) and not cut:
            raise
        raise CheckpointError(f"{place} cannot be read: {error!r}") from error
