"""Linear layers with weights of eight bits, for inference.

Shape letters: C inputs, D outputs, N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 127
"""Largest integer of a weight, so that the range is symmetric."""
GROUP = 16
"""Inputs that torch's kernel takes at a time. Of a number of inputs that is no multiple it reads past the end."""
MOST_ROWS = 16
"""Rows up to which torch's kernel, which reads the integers once a row, is faster than a product of matrices."""


class Int8Linear(nn.Module):
    """`y = (x q^T) * scale + bias` with integers q `[D, C]` and a scale for each output, in place of an `nn.Linear`.

    The scale of an output is its largest absolute weight over 127, so a weight changes by at most half of it. Inputs
    and products are rounded to bfloat16, which torch's kernel for a CPU computes with; y has the dtype of x. There are
    no derivatives: raises `ValueError` for an input that needs one.
    """

    integers: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight_DC = linear.weight.detach().float()
        # Rounded first, so that the integers are those of the scale that they are multiplied by.
        scale_D = (weight_DC.abs().amax(1) / LARGEST).to(torch.bfloat16)
        divisor_D1 = scale_D.float().masked_fill(scale_D == 0, 1.0)[:, None]
        integers_DC = (weight_DC / divisor_D1).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        self.register_buffer("integers", integers_DC.contiguous())
        self.register_buffer("scale", scale_D)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map `[.., C]` to `[.., D]`."""
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("an Int8Linear has no derivative: train first, then quantize, and call it in no_grad")
        if self.scale.dtype != torch.bfloat16:
            raise ValueError(
                f"the scales of an Int8Linear must be bfloat16, got {self.scale.dtype}: convert the model before it is "
                "quantized"
            )
        half_NC = x.to(torch.bfloat16).reshape(-1, self.in_features)
        by_kernel = x.device.type == "cpu" and len(half_NC) <= MOST_ROWS and self.in_features % GROUP == 0
        if by_kernel and len(half_NC):
            y_ND = torch._weight_int8pack_mm(half_NC, self.integers, self.scale)
        else:
            y_ND = F.linear(half_NC, self.integers.to(torch.bfloat16)) * self.scale
        y = y_ND.view(*x.shape[:-1], self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
