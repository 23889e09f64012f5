"""`.ci/release.py` on small copies: what a release needs, one line for each thing that is missing, and the notes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.version import __version__

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".venv-release/bin/python"
NOTES = "### Added\n\n- A layer."
FILES = {
    "subquad/version.py": '__version__ = "1.2.3"\n',
    "CITATION.cff": "version: 1.2.3\ndate-released: 2026-01-02\n",
    "CHANGELOG.md": f"""# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-02

{NOTES}

## [1.2.2] - 2025-12-01

- An older layer.
""",
}


def release(folder: Path, *arguments: str, python: Path | str = sys.executable) -> tuple[int, str, list[str]]:
    """Return the status, the output and the lines of errors of the copy of the script in `folder`."""
    command = [python, folder / ".ci/release.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    return done.returncode, done.stdout, done.stderr.splitlines()


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    alone = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    subprocess.run(["git", "-C", folder, *names, *arguments], check=True, capture_output=True, env=alone)


@pytest.fixture
def copy(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release.py", tmp_path / ".ci")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_notes_are_the_section_of_the_version(copy):
    assert release(copy, "1.2.3", "--notes") == (0, NOTES + "\n", [])


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("subquad/version.py", "1.2.3", "1.2.4", r"version.py: __version__ must be '1\.2\.3', is '1\.2\.4'"),
        ("CHANGELOG.md", "[1.2.3] - 2026-01-02", "1.2.3", r"no section '## \[1\.2\.3\] - YYYY-MM-DD'"),
        ("CHANGELOG.md", " - 2026-01-02", " - 2026-02-30", r"must have a date YYYY-MM-DD, has '2026-02-30'"),
        ("CHANGELOG.md", " - 2026-01-02", "", r"must have a date YYYY-MM-DD, has ''"),
        ("CHANGELOG.md", NOTES, "", r"the section \[1\.2\.3\] is empty"),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- New.\n", r"\[Unreleased\] has entries: move them"),
        ("CHANGELOG.md", "## [1.2.3]", "## [1.2.5] - 2026-01-03\n\n## [1.2.3]", r"but \[1\.2\.5\] stands above it"),
        ("CITATION.cff", "version: 1.2.3", "version: 1.2.2", r"version must be 1\.2\.3, is 1\.2\.2"),
        ("CITATION.cff", "2026-01-02", "2026-01-03", r"must be 2026-01-02, as in CHANGELOG\.md, is '2026-01-03'"),
        ("CITATION.cff", "date-released: 2026-01-02\n", "", r"must be 2026-01-02, as in CHANGELOG\.md, is ''"),
    ],
)
def test_each_thing_that_is_missing_is_one_line(copy, name, old, new, message):
    assert old in FILES[name]
    (copy / name).write_text(FILES[name].replace(old, new), encoding="utf-8")
    status, output, errors = release(copy, "1.2.3", "--notes")
    assert (status, output, len(errors)) == (1, "", 1)
    assert re.search(message, errors[0])


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.3", "1.02.3"])
def test_a_version_is_three_numbers(copy, version):
    status, _, errors = release(copy, version, "--notes")
    assert (status, len(errors)) == (1, 1)
    assert re.search(rf"VERSION is '{version}': it must be three numbers", errors[0])


def test_a_dirty_tree_and_a_tag_that_exists_stand_in_the_way(copy):
    git(copy, "init")
    git(copy, "add", ".")
    git(copy, "commit", "--message", "A layer")
    git(copy, "tag", "v1.2.3")
    (copy / "README.md").touch()
    assert release(copy, "1.2.3")[2] == [
        "the working tree has changes that are not committed: README.md",
        "the tag v1.2.3 exists already",
    ]


def test_the_citation_names_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="`make dist` brings what builds a release")
def test_a_clone_with_a_dated_section_is_ready(tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", str(ROOT), str(clone))
    shutil.copytree(ROOT / ".ci", clone / ".ci", dirs_exist_ok=True)
    version = "987.6.5"
    for name, pattern, new in [
        ("subquad/version.py", __version__, version),
        ("CHANGELOG.md", r"## \[Unreleased\]\n", f"## [Unreleased]\n\n## [{version}] - 2026-01-02\n"),
        (
            "CITATION.cff",
            r"\nversion: .*\n(date-released: .*\n)?",
            f"\nversion: {version}\ndate-released: 2026-01-02\n",
        ),
    ]:
        text, count = re.subn(pattern, new, (clone / name).read_text(encoding="utf-8"))
        assert count == 1, name
        (clone / name).write_text(text, encoding="utf-8")
    git(clone, "commit", "--all", "--message", "Release")
    status, output, errors = release(clone, version, python=TOOLS)
    assert status == 0, errors
    assert {file.name for file in (clone / "dist").iterdir()} == {
        f"subquad-{version}.tar.gz",
        f"subquad-{version}-py3-none-any.whl",
    }
    assert output.endswith(f'git tag --annotate v{version} --message "subquad {version}"\ngit push origin v{version}\n')
