"""Shell commands as the user of this program can type them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys


def command(*words: object, processes: int = 1) -> str:
    """Return `subquad` with `words` as a line for the shell in which this program was started.

    An environment's `subquad` is often not on the PATH, so the line begins as this program's own did: with `subquad`,
    the path of that script, or `python -m subquad`. Several `processes` are started by torchrun.
    """
    script = sys.argv[0]
    if processes > 1:
        begin = [_python(), "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "-m", "subquad"]
    elif os.path.basename(script) != "subquad":
        begin = [_python(), "-m", "subquad"]
    else:
        begin = ["subquad" if _is_found("subquad", script) else script]
    return shlex.join([*begin, *map(str, words)])


def install(package: str) -> str:
    """Return the line that installs a package, or an extra as in `subquad[serve]`, beside this program."""
    return shlex.join([_python(), "-m", "pip", "install", package])


def _python() -> str:
    """Return this Python as it was typed, else its path."""
    typed = next(iter(sys.orig_argv), "")
    return typed if _is_found(typed, sys.executable) else sys.executable


def _is_found(name: str, file: str) -> bool:
    """Return whether the shell finds `file` by `name`."""
    found = shutil.which(name)
    return found is not None and os.path.abspath(found) == os.path.abspath(file)
