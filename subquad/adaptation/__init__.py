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
    from subquad.adaptation.replace import replace_attention

__all__ = ["ConvertConfig", "ExtendConfig", "convert", "extend", "replace_attention"]

__getattr__ = facade(
    __name__, {"adapters": "adapters", "convert": "conversion", "extend": "extension", "replace_attention": "replace"}
)
__dir__ = __all__.copy
