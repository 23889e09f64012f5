"""Normalisation over the model width."""

from torch import nn

from subquad.config import suggest

NORMS = ("layer", "rms")


def build_norm(kind: str, dim: int, eps: float | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """Build `layer`: `(x - mean) / sqrt(var + eps) * w + b`, or `rms`: `x / sqrt(mean(x^2) + eps) * w`, over D = `dim`.

    `eps` defaults to 1e-5 for `layer` and 1e-6 for `rms`. Raises `ValueError` for an unknown kind.
    """
    if kind == "layer":
        return nn.LayerNorm(dim, eps=1e-5 if eps is None else eps)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6 if eps is None else eps)
    raise ValueError(f"unknown norm {kind!r}; {suggest(kind, NORMS)}")
