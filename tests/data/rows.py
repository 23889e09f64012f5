"""Rows of the probes by their numbers, as tests ask for them: `passkey(length, rows, digits=3, seed=1)`."""

from functools import partial

from subquad.data.config import ProbeConfig
from subquad.data.probes import ProbeRows, probe_rows


def made(name: str, length: int, rows: int, *, depth=None, first=0, seed=0, **numbers) -> ProbeRows:
    return probe_rows(ProbeConfig(name=name, **numbers), length, rows, depth=depth, first=first, seed=seed)


passkey, mqar, copy = (partial(made, name) for name in ("passkey", "mqar", "copy"))
