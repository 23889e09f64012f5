"""The commit that a result names."""

import subprocess

import pytest

from subquad.evaluation import provenance


@pytest.mark.parametrize(("head", "status", "commit"), [
    ("abc123", "", "abc123"), ("abc123", " M a.py", "abc123 with changes"), (None, "", "as told"),
])  # fmt: skip
def test_the_commit_is_that_of_the_checkout_or_what_the_environment_says(head, status, commit, monkeypatch):
    def git(command, **_):
        said = head if "rev-parse" in command else status
        return subprocess.CompletedProcess(command, 128 if head is None else 0, f"{said}\n")

    monkeypatch.setattr(subprocess, "run", git)
    monkeypatch.setenv("SUBQUAD_COMMIT", "as told")
    assert provenance.commit() == commit
