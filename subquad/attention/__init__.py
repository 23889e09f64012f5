"""Mechanisms: one file each, named as its class and its registry name, and imported when it is first used."""

import re
from typing import TYPE_CHECKING

from subquad.attention.base import Attention, Cost, after_step, build, mechanism, names
from subquad.lazy import facade

if TYPE_CHECKING:
    from subquad.attention.bigbird import Bigbird
    from subquad.attention.delta_net import DeltaNet
    from subquad.attention.dilated import Dilated
    from subquad.attention.elita import Elita
    from subquad.attention.full import Full
    from subquad.attention.gated_delta_net import GatedDeltaNet
    from subquad.attention.gated_slots import GatedSlots
    from subquad.attention.gla import Gla
    from subquad.attention.hgrn2 import Hgrn2
    from subquad.attention.kda import Kda
    from subquad.attention.latte import Latte
    from subquad.attention.latte_macchiato import LatteMacchiato
    from subquad.attention.linear import Linear
    from subquad.attention.linformer import Linformer
    from subquad.attention.llp import Llp
    from subquad.attention.llp_printed import LlpPrinted
    from subquad.attention.logsparse import Logsparse
    from subquad.attention.longformer import Longformer
    from subquad.attention.luna import Luna
    from subquad.attention.mamba2 import Mamba2
    from subquad.attention.mlstm import Mlstm
    from subquad.attention.performer import Performer
    from subquad.attention.retnet import Retnet
    from subquad.attention.shifted import Shifted
    from subquad.attention.strided import Strided
    from subquad.attention.window import Window

__all__ = [
    "Attention",
    "Bigbird",
    "Cost",
    "DeltaNet",
    "Dilated",
    "Elita",
    "Full",
    "GatedDeltaNet",
    "GatedSlots",
    "Gla",
    "Hgrn2",
    "Kda",
    "Latte",
    "LatteMacchiato",
    "Linear",
    "Linformer",
    "Llp",
    "LlpPrinted",
    "Logsparse",
    "Longformer",
    "Luna",
    "Mamba2",
    "Mlstm",
    "Performer",
    "Retnet",
    "Shifted",
    "Strided",
    "Window",
    "after_step",
    "build",
    "mechanism",
    "names",
]

__getattr__ = facade(
    __name__, {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in __all__ if name not in globals()}
)
__dir__ = __all__.copy
