"""Find modules that hooks or adapters are attached to, whose weights can't be read in place of a call."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as globally
from torch.nn.utils.parametrize import is_parametrized

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attached(model: nn.Module) -> str | None:
    """Return the first module of `model` with something attached to it, and what, or None.

    Hooks (offloading, pruning, weight norm), parametrisations, adapters of PEFT and a replaced `forward` (accelerate)
    count. They take effect when a module is called, and not when its weights are read.
    """
    if any(getattr(globally, f"_global{name}") for name in HOOKS):
        return "all modules have a hook"
    for name, module in model.named_modules():
        if any(getattr(module, kind) for kind in HOOKS):
            return f"{name or 'the model'} has a hook"
        if "forward" in vars(module):
            return f"{name or 'the model'} has another forward"
        if is_parametrized(module):
            return f"{name} is parametrised"
        if hasattr(type(module), "adapter_layer_names"):
            return f"{name} has an adapter"
    return None
