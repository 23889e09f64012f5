"""Which documents are held out: a hash decides, so it is the same on every machine and stays when others are added."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def hold_out(keys: Sequence[bytes], fraction: float, seed: int = 0) -> list[bool]:
    """Whether to hold out each document: SHA-256 of seed and key, read as a number in [0, 1), is below `fraction`.

    At least one document is on each side: where the hashes say otherwise, the one with the least (or the greatest)
    changes sides. Raises `ValueError` for fewer than two documents.
    """
    if len(keys) < 2:
        raise ValueError(f"a split by document needs at least two documents, got {len(keys)}")
    prefix = f"{seed} ".encode()
    numbers = [int.from_bytes(hashlib.sha256(prefix + key).digest()[:8], "big") for key in keys]
    held_out = [number < fraction * 2**64 for number in numbers]
    if not any(held_out):
        held_out[numbers.index(min(numbers))] = True
    if all(held_out):
        held_out[numbers.index(max(numbers))] = False
    return held_out


def cut(text: bytes, fraction: float) -> int:
    """Where to cut a single document: its last `fraction` is held out, from the next character's first byte on.

    Raises `ValueError` where one of the two parts would be empty.
    """
    place = int(len(text) * (1 - fraction))
    while place < len(text) and text[place] & 0xC0 == 0x80:  # inside a character
        place += 1
    if not 0 < place < len(text):
        raise ValueError(f"a document of {len(text)} bytes is too short to hold out {fraction} of it")
    return place
