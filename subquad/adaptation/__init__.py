"""Existing checkpoints, adapted: `extend` makes a model of transformers read longer windows, `convert` replaces full
attention in a trained model. The configurations import no torch; every other name loads its module on first use."""

from typing import TYPE_CHECKING

from subquad.adaptation.config import ConvertConfig, ExtendConfig
from subquad.lazy import facade

if TYPE_CHECKING:
    from subquad.adaptation import adapters as adapters
    from subquad.adaptation.conversion import convert
    from subquad.adaptation.extension import extend, train_control
    from subquad.adaptation.replace import Replacement, replace_attention, replaced_layers
    from subquad.adaptation.transfer import attention_errors

__all__ = [
    "ConvertConfig",
    "ExtendConfig",
    "Replacement",
    "attention_errors",
    "convert",
    "extend",
    "replace_attention",
    "replaced_layers",
    "train_control",
]

__getattr__ = facade(
    __name__,
    {
        "Replacement": "replace",
        "adapters": "adapters",
        "attention_errors": "transfer",
        "convert": "conversion",
        "extend": "extension",
        "replace_attention": "replace",
        "replaced_layers": "replace",
        "train_control": "extension",
    },
)
