"""`subquad.program`: how a command is typed depends on how this program was started."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CODE = "import sys; from subquad import program; sys.stdout.write({code})"


@pytest.fixture
def environment(tmp_path):
    """A working directory with an environment whose script `subquad` prints two commands."""
    binaries = tmp_path / "a folder" / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    script = binaries / "subquad"
    code = "program.command('eval', 'a b', '--length', 8) + chr(10) + program.install('subquad[serve]')"
    script.write_text(f"#!{sys.executable}\n{CODE.format(code=code)}\n")
    script.chmod(0o755)
    return tmp_path / "a folder"


def said(line, folder, path="/usr/bin:/bin"):
    """What a line typed in `folder` prints, as lists of words."""
    settings = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=settings, capture_output=True, text=True, check=True)
    return [shlex.split(each) for each in done.stdout.splitlines()]


@pytest.mark.parametrize(("typed", "shown"), [
    (".venv/bin/subquad", ".venv/bin/subquad"),
    ("'{}/.venv/bin/subquad'", "{}/.venv/bin/subquad"),
    ("PATH='{}/.venv/bin':$PATH; subquad", "subquad"),
    ("cd ..; PATH='{}/.venv/bin':$PATH; \"a folder/.venv/bin/subquad\"", "subquad"),
])  # fmt: skip
def test_a_script_is_named_as_it_was_typed_or_by_its_name_on_the_path(environment, typed, shown):
    command, install = said(typed.format(environment), environment)
    assert command == [shown.format(environment), "eval", "a b", "--length", "8"]
    assert install == [sys.executable, "-m", "pip", "install", "subquad[serve]"]


def test_another_subquad_on_the_path_is_not_taken(environment, tmp_path):
    (tmp_path / "subquad").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "subquad").chmod(0o755)
    assert said(".venv/bin/subquad", environment, f"{tmp_path}:/usr/bin:/bin")[0][0] == ".venv/bin/subquad"


@pytest.mark.parametrize(
    ("path", "python"), [("/usr/bin:/bin", sys.executable), (str(Path(sys.executable).parent), "python")]
)
def test_other_programs_name_their_python(tmp_path, path, python):
    code = CODE.format(code="program.command('list') + chr(10) + program.command('list', processes=2)")
    alone, several = said(f'exec {python} -c "{code}"', tmp_path, f"{path}:/bin")
    assert alone == [python, "-m", "subquad", "list"]
    assert several == [python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "subquad", "list"]


def test_a_line_of_the_module_runs_as_it_is_printed(tmp_path):
    printed = subprocess.run([sys.executable, "-m", "subquad", "nothing"], capture_output=True, text=True, check=False)
    line = printed.stderr.splitlines()[-1].removeprefix("see ")
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.startswith("usage: ")
