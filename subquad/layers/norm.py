"""Normalisation over the model width."""

from torch import nn

from subquad.config import suggest

NORMS = ("layer", "rms")


def build_norm(kind: str, dim: int) -> nn.LayerNorm | nn.RMSNorm:
    """`layer`: `(x - mean) / sqrt(var + 1e-5) * w + b`; `rms`: `x / sqrt(mean(x^2) + 1e-6) * w`, over D = `dim`."""
    if kind == "layer":
        return nn.LayerNorm(dim)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6)
    raise ValueError(f"unknown norm {kind!r}; {suggest(kind, NORMS)}")
