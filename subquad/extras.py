"""The extras of `pip install "subquad[EXTRA]"`: which packages each brings, and the error where one is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from subquad.program import install

PACKAGES = {
    "hf": ("tokenizers", "transformers"),
    "train": ("PIL", "accelerate", "jsonargparse", "matplotlib", "rich", "tensorboard", "yaml"),
    "peft": ("peft",),
    "datasets": ("datasets",),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "prometheus_client", "uvicorn"),
    "testing": ("hypothesis", "pytest"),
    "triton": ("triton",),
}
"""The packages of each extra, by the names that are imported, without those of the extra that it includes."""
INCLUDES = {"train": "hf", "peft": "train", "datasets": "train", "eval": "train", "serve": "train"}
"""The extra that another one includes."""


@contextmanager
def needed(what: str, extra: str | None = None) -> Iterator[None]:
    """Raise `ImportError` for a package of an extra that the block imports and that is not installed.

    The error says that `what` needs the package, and the line that installs `extra`, or another extra if that has not
    the package. Other errors of the block, those of a block inside it too, pass as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        owner = next((name for name, packages in PACKAGES.items() if package in packages), None)
        if owner is None or is_installed(package):
            raise
        line = install(f"subquad[{extra if extra and owner in included(extra) else owner}]")
        raise ImportError(f"{what} needs {package}, which is not installed: {line}", name=error.name) from error


def included(extra: str) -> list[str]:
    """Return an extra, the one that it includes, and so on."""
    return [extra, *(included(INCLUDES[extra]) if extra in INCLUDES else [])]


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec stands in for it
        return False
