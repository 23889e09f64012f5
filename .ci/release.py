#!/usr/bin/env python3
"""Check all that a release needs, and print the two commands that make it. Nothing is published.

It checks the files that name the version, the working tree and the tag, then builds the sdist and the wheel in dist/
and checks them, for which its Python needs what .ci/tools.txt names. `make release VERSION=x.y.z` brings it.
"""

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## \[(.+?)\](?: - (.+))?$", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sections() -> dict[str, tuple[str, str]]:
    """Return the date and the text of each version in CHANGELOG.md, newest first; a date may be empty."""
    _, *parts = HEADING.split(read("CHANGELOG.md"))
    each = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: (day or "", text.strip()) for name, day, text in each}


def is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def errors_of_files(version: str) -> list[str]:
    """Return what version.py, CHANGELOG.md and CITATION.cff lack for `version`, one line each."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        return [f"VERSION is {version!r}: it must be three numbers, as in 0.1.0"]
    errors = []
    found = re.search(r'^__version__ = "(.*)"$', read("subquad/version.py"), re.MULTILINE)
    if not found or found[1] != version:
        errors.append(f"subquad/version.py: __version__ must be {version!r}, is {found and found[1]!r}")

    changes = sections()
    day, text = changes.get(version, ("", ""))
    released = [name for name in changes if name != "Unreleased"]
    if version not in changes:
        errors.append(f"CHANGELOG.md: there is no section '## [{version}] - YYYY-MM-DD'")
    elif released[0] != version:
        errors.append(f"CHANGELOG.md: [{version}] must be the newest version, but [{released[0]}] stands above it")
    elif not is_date(day):
        errors.append(f"CHANGELOG.md: [{version}] must have a date YYYY-MM-DD, has {day!r}")
    elif not text:
        errors.append(f"CHANGELOG.md: the section [{version}] is empty")
    if version in changes and changes.get("Unreleased", ("", ""))[1]:
        errors.append(f"CHANGELOG.md: [Unreleased] has entries: move them to [{version}]")

    citation = dict(re.findall(r'^(version|date-released): *"?([^"\n]*)"?$', read("CITATION.cff"), re.MULTILINE))
    if citation.get("version") != version:
        errors.append(f"CITATION.cff: version must be {version}, is {citation.get('version')}")
    stated = citation.get("date-released", "")
    if not is_date(stated) or (is_date(day) and stated != day):
        errors.append(f"CITATION.cff: date-released must be {day or 'YYYY-MM-DD'}, as in CHANGELOG.md, is {stated!r}")
    return errors


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def errors_of_tree(tag: str) -> list[str]:
    """Return what stands in the way of a tag on the working tree's commit, one line each."""
    errors = []
    if changed := git("status", "--porcelain").splitlines():
        names = ", ".join(line[3:] for line in changed)
        errors.append(f"the working tree has changes that are not committed: {names}")
    if git("tag", "--list", tag):
        errors.append(f"the tag {tag} exists already")
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="VERSION", help="three numbers, as in 0.1.0")
    parser.add_argument("--notes", action="store_true", help="check the files alone; print the changelog's section")
    arguments = parser.parse_args()
    version, tag = arguments.version, f"v{arguments.version}"
    errors = errors_of_files(version)
    if not arguments.notes:
        errors += errors_of_tree(tag)
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        return 1
    if arguments.notes:
        print(sections()[version][1])
        return 0
    if subprocess.run([ROOT / ".ci" / "dist", sys.executable], check=False).returncode:
        return 1
    print(f"\n{version} is ready in dist/, and nothing is published. These two commands publish it:\n")
    print(f'git tag --annotate {tag} --message "subquad {version}"\ngit push origin {tag}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
