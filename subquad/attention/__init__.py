"""Mechanisms: one file each, named as its class and its registry name. This folder is the list."""

import importlib
import pkgutil

from subquad.attention._laws import LAWS
from subquad.attention.base import Attention, Cost, build, mechanism, names

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_") and _module.name != "base":
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["LAWS", "Attention", "Cost", "build", "mechanism", "names"]
