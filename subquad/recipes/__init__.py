"""Recipes: shipped training configurations, one YAML file each. A comment on the first line says what it is for."""

from __future__ import annotations

from pathlib import Path

from subquad.config import suggest

FOLDER = Path(__file__).parent


__all__ = ["recipe_path", "recipes"]


def recipes() -> list[str]:
    """The names of the recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The file of the recipe `name`; `ValueError` lists the valid names."""
    if name not in recipes():
        raise ValueError(f"unknown recipe {name!r}; {suggest(name, recipes())}")
    return FOLDER / f"{name}.yaml"
