"""Run a model without training it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Set eval mode and disable gradients within the block; restore the mode of each module after it."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model takes its inputs on: that of its first tensor, or the CPU for none.

    Offloaded weights are on `meta`; their modules move inputs to the device that computes.
    """
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
