"""Rotary frequencies for longer contexts than in training, as in transformers. This module doesn't import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from subquad.config import Config, suggest, type_hints


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Config):
    """Scaling of the rotary frequencies `f_c = base ** (-2c / K)`, which maps longer contexts to trained positions.

    With s = factor, L = original and n_c = L f_c / 2 pi, the number of turns of frequency c within L tokens:

    * `linear`: `f_c / s` (Chen et al. 2023, arXiv:2306.15595);
    * `dynamic`: the base becomes `base * (s N / L - s + 1) ** (K / (K - 2))` for sequences of N = length tokens
      (NTK-aware scaling, bloc97 and emozilla 2023). Transformers computes N anew in every call, so that each output
      depends on how many tokens follow; here N is fixed, and N = L changes nothing;
    * `yarn`: `f_c / s` below beta_slow turns, `f_c` above beta_fast, a ramp over the channels between them, and cosines
      and sines times attention_factor (Peng et al. 2023, arXiv:2309.00071);
    * `llama3`: `f_c / s` below low_freq_factor turns, `f_c` above high_freq_factor, a ramp over n_c between them
      (Llama 3.1, arXiv:2407.21783, as transformers computes it).
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = "linear"
    """Rule that changes the frequencies."""
    factor: float = 1.0
    """s: ratio of the longer context to the trained one."""
    original: int | None = None
    """L: sequence length in training, in tokens; required except for linear."""
    length: int | None = None
    """dynamic: N, target sequence length in tokens (None: original, which changes nothing)."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines (None: 0.1 ln(s) + 1, or by mscale and mscale_all_dim)."""
    beta_fast: float = 32.0
    """yarn: number of turns within L above which a frequency is unchanged."""
    beta_slow: float = 1.0
    """yarn: number of turns within L below which a frequency is divided by s."""
    mscale: float | None = None
    """yarn: with mscale_all_dim, attention_factor is (0.1 mscale ln(s) + 1) / (0.1 mscale_all_dim ln(s) + 1)."""
    mscale_all_dim: float | None = None
    """yarn: see mscale."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole channels."""
    low_freq_factor: float = 1.0
    """llama3: number of turns within L below which a frequency is divided by s."""
    high_freq_factor: float = 4.0
    """llama3: number of turns within L above which a frequency is unchanged."""

    def __post_init__(self) -> None:
        choices = get_args(type_hints(type(self))["kind"])
        if self.kind not in choices:
            raise ValueError(f"unknown rope scaling {self.kind!r}; {suggest(str(self.kind), choices)}")
        self.check_least("rope_scaling", factor=1)
        if self.kind != "linear" and (self.original is None or self.original < 1):
            raise ValueError(
                f"rope_scaling.original, the length trained on, must be at least 1 for kind={self.kind}, "
                f"got {self.original}"
            )
        if self.length is not None and (self.original is None or self.length < self.original):
            raise ValueError(
                f"rope_scaling.length must be at least original, got length={self.length}, original={self.original}"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                "rope_scaling.beta_slow must be above 0 and at most beta_fast, "
                f"got beta_slow={self.beta_slow}, beta_fast={self.beta_fast}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be above 0 and below high_freq_factor, "
                f"got low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"rope_scaling.{name} must be above 0, got {value}")

    def frequencies(self, channels: int, base: float) -> list[float]:
        """Return the angle per position of each of the `channels / 2` pairs of channels."""
        if self.kind == "dynamic":
            return plain_frequencies(channels, self._dynamic_base(channels, base))
        plain = plain_frequencies(channels, base)
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        kept = self._yarn_kept(channels, base) if self.kind == "yarn" else self._llama3_kept(plain)
        return [f * (share + (1 - share) / self.factor) for f, share in zip(plain, kept, strict=True)]

    @property
    def amplitude(self) -> float:
        """Return the factor of cosines and sines, which is 1 except for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def _dynamic_base(self, channels: int, base: float) -> float:
        assert self.original is not None
        if channels <= 2:
            raise ValueError(f"dynamic rope scaling needs more than 2 rotated channels per head, got {channels}")
        stretch = self.factor * (self.length or self.original) / self.original - (self.factor - 1)
        return base * float(stretch ** (channels / (channels - 2)))

    def _yarn_kept(self, channels: int, base: float) -> list[float]:
        """Return the unscaled share of each frequency: 1 for the first channels, 0 for the last."""
        assert self.original is not None

        def pair_with(turns: float) -> float:
            assert self.original is not None
            return channels * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        width = high - low if high != low else 0.001
        return [1 - min(max((c - low) / width, 0.0), 1.0) for c in range(channels // 2)]

    def _llama3_kept(self, plain: list[float]) -> list[float]:
        assert self.original is not None
        span = self.high_freq_factor - self.low_freq_factor
        turns = (self.original * f / (2 * math.pi) for f in plain)
        return [min(max((n - self.low_freq_factor) / span, 0.0), 1.0) for n in turns]


def plain_frequencies(channels: int, base: float) -> list[float]:
    """Return `base ** (-2c / channels)` for c from 0 to `channels / 2 - 1`."""
    return [base ** (-2 * c / channels) for c in range(channels // 2)]


def rotated_channels(channels: int, fraction: float) -> int:
    """Return the number of rotated channels per head: `floor(fraction * channels)`."""
    return int(channels * fraction)
