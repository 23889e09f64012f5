"""Adapt existing checkpoints: `extend` lets a transformers model read longer texts, `convert` replaces full attention.

The configurations don't import transformers; every other name imports its module on first use.
"""

from typing import TYPE_CHECKING

from subquad.adaptation.config import ConvertConfig, ExtendConfig
from subquad.lazy import facade

if TYPE_CHECKING:
    from subquad.adaptation import adapters as adapters
    from subquad.adaptation.conversion import convert
    from subquad.adaptation.extension import extend

__all__ = ["ConvertConfig", "ExtendConfig", "convert", "extend"]

__getattr__ = facade(__name__, {"adapters": "adapters", "convert": "conversion", "extend": "extension"})
__dir__ = __all__.copy
