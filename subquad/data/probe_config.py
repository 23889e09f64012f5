"""What a probe of memory asks, apart from the code that makes its sequences, so that reading it loads no numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subquad.config import Config

ProbeName = Literal["passkey", "mqar", "copy"]
MARKS = 2
"""Tokens of the passkey probe that are neither digits nor filler: one before the key, one that asks."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """A probe: sequences made up from a seed, parts of which can be predicted by remembering earlier tokens alone."""

    name: ProbeName = "mqar"
    """passkey: a key of digits hidden in filler, asked for at the end; mqar: pairs of keys and values, then keys whose
    values are asked for (multi-query associative recall); copy: a random string, a separator, the string again."""
    digits: int = 4
    """Digits of the key (passkey)."""
    pairs: int = 8
    """Pairs of a key and a value, each asked for once (mqar)."""
    symbols: int = 32
    """Tokens of filler (passkey), keys and as many values (mqar), letters of the alphabet (copy)."""
    shortest: int | None = None
    """Letters of the shortest string to learn (copy): how many there are is drawn from it up to half of the sequence.
    None: always half of it, which can be learned as a distance that other lengths do not have."""
    examples: int = 100_000
    """Sequences to learn from; after them come the same again, in another order."""
    held_out: int = 500
    """Other sequences, to measure on."""
    seed: int = 0
    """Another number gives other sequences."""

    def __post_init__(self) -> None:
        for name in ("digits", "pairs", "examples", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"probe.{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"probe.seed must be at least 0, got {self.seed}")
        if self.shortest is not None and (self.name != "copy" or self.shortest < 1):
            raise ValueError(
                f"probe.shortest is the number of letters of a string to copy, at least 1, got {self.shortest} for the "
                f"probe {self.name}"
            )
        fewest = {"passkey": 1, "mqar": self.pairs, "copy": 2}[self.name]
        if self.symbols < fewest:
            needed = "a key for each of its pairs" if self.name == "mqar" else f"at least {fewest}"
            raise ValueError(
                f"the vocabulary is too small: {self.name} needs {needed}, so probe.symbols must be at least {fewest}, "
                f"got {self.symbols}"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens of the probe's vocabulary."""
        return {"passkey": 10 + MARKS + self.symbols, "mqar": 2 * self.symbols, "copy": 1 + self.symbols}[self.name]

    @property
    def chance(self) -> float:
        """Accuracy without memory: of guessed digits (passkey), a guessed letter (copy), any value of a pair (mqar)."""
        return {"passkey": 10.0**-self.digits, "mqar": 1 / self.pairs, "copy": 1 / self.symbols}[self.name]

    @property
    def fewest_tokens(self) -> int:
        """Tokens of the shortest sequence that asks all."""
        return {"passkey": 2 * (self.digits + 1), "mqar": 3 * self.pairs + 1, "copy": 3}[self.name]

    def first_asked(self, length: int) -> int:
        """The first place of a sequence of `length` tokens whose token may be asked for.

        Raises `ValueError` for a length below `fewest_tokens`, and for one whose half is below `shortest`.
        """
        if length < self.fewest_tokens:
            what = {"passkey": f"digits={self.digits}", "mqar": f"pairs={self.pairs}", "copy": "one letter"}[self.name]
            raise ValueError(
                f"{self.name} with {what} needs sequences of at least {self.fewest_tokens} tokens, got length={length}"
            )
        if self.shortest is not None and (length - 1) // 2 < self.shortest:
            raise ValueError(
                f"a string of probe.shortest={self.shortest} letters does not fit twice in {length} tokens with a "
                "separator"
            )
        string = (length - 1) // 2 if self.shortest is None else self.shortest
        return {"passkey": length - self.digits, "mqar": 2 * self.pairs + 1, "copy": string + 1}[self.name]
