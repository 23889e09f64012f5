"""The requirements of pyproject.toml: `make lowest` runs the lowest versions, `make test` those of constraints.txt."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (line for extra in project["optional-dependencies"].values() for line in extra)
    found = (Requirement(line) for line in (*project["dependencies"], *extras))
    return [requirement for requirement in found if requirement.name != "subquad"]


def test_every_requirement_has_a_lower_bound_and_is_pinned_above_it():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (Requirement(line) for line in lines if line and not line.startswith("#"))
    pinned = {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in pins}
    for requirement in requirements():
        assert any(bound.operator == ">=" for bound in requirement.specifier), str(requirement)
        assert pinned[requirement.name.lower()] in requirement.specifier, str(requirement)
