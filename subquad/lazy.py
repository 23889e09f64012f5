"""Lazy facades: a public name imports its module when it is first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from subquad.extras import needed


def facade(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, where `modules` names the module of each public name.

    A module without a dot is a submodule of `package`. Any other name raises `AttributeError` with the valid ones. If
    the module needs a package of an extra that is missing, the `ImportError` says what to install.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}")
        module = modules[name]
        with needed(f"{package}.{name}"):
            found = importlib.import_module(module if "." in module else f"{package}.{module}")
        return found if found.__name__ == f"{package}.{name}" else getattr(found, name)

    return __getattr__
