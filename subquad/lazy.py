"""Facades of packages whose modules are slow to import: a name loads its module when it is first asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def facade(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, where `modules` names the module of each public name.

    A module without a dot is a submodule of `package`. Raises `AttributeError` with the valid names for any other one.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}")
        module = modules[name]
        found = importlib.import_module(module if "." in module else f"{package}.{module}")
        return found if found.__name__ == f"{package}.{name}" else getattr(found, name)

    return __getattr__
