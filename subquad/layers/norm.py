"""Normalisation over the model width, or over a head's channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.config import suggest
from subquad.ops.precision import wide_dtype

NORMS = ("layer", "rms", "zero_centred_rms", "unscaled_layer")


class ZeroCentredRMSNorm(nn.RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + w)`: weight decay pulls the scale to 1; in float32 or wider (Qwen3-Next)."""

    def reset_parameters(self) -> None:
        """Set the weights to zeros, a scale of 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm over the last dimension, in the dtype of `x`."""
        wide = wide_dtype(x)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


def build_norm(kind: str, dim: int, eps: float | None = None) -> nn.LayerNorm | nn.RMSNorm:
    """Build `layer`: `(x - mean) / sqrt(var + eps) * w + b`, or `rms`: `x / sqrt(mean(x^2) + eps) * w`, over D = `dim`.

    `zero_centred_rms` is `rms` with `1 + w` in place of w. `unscaled_layer` is `layer` without w and b, as in
    ELiTA's code (Sharma 2023). `eps` defaults to 1e-5 for layer norms and 1e-6 for the others.
    Raises `ValueError` for an unknown kind.
    """
    if kind in ("layer", "unscaled_layer"):
        return nn.LayerNorm(dim, eps=1e-5 if eps is None else eps, elementwise_affine=kind == "layer")
    if kind in NORMS:
        cls = nn.RMSNorm if kind == "rms" else ZeroCentredRMSNorm
        return cls(dim, eps=1e-6 if eps is None else eps)
    raise ValueError(f"unknown norm {kind!r}; {suggest(kind, NORMS)}")
