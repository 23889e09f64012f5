"""Recipes: shipped training configurations, one YAML file each; the comment on the first line describes it."""

from __future__ import annotations

from pathlib import Path

from subquad.config import suggest

FOLDER = Path(__file__).parent


__all__ = ["recipe_path", "recipes"]


def recipes() -> list[str]:
    """Return the sorted names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of recipe `name`. Raises `ValueError` with similar or all valid names if it is unknown."""
    if name not in recipes():
        raise ValueError(f"unknown recipe {name!r}; {suggest(name, recipes())}")
    return FOLDER / f"{name}.yaml"
