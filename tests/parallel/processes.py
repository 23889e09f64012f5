"""Real processes with gloo: one start of them, which takes seconds, runs many cases.

As a script, `python processes.py SIZE FOLDER` imports torch once and forks the processes.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
"""Limit of a process's wait for another one."""


def run_processes(size, cases, folder, seconds=150):
    """Return the tracebacks of all processes for each case, by its name: empty if it passed.

    `cases` are function calls as `name: [ranks, module, function, *arguments]`: the first `ranks` processes make a
    group, which is the function's first argument.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, late = [sys.executable, "-W", "error", __file__, str(size), str(folder)], ""
    with (folder / "start.out").open("w") as out:
        start = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            start.wait(seconds)
        except subprocess.TimeoutExpired:
            late = f"the processes did not end within {seconds} seconds\n"
        with suppress(ProcessLookupError):
            os.killpg(start.pid, signal.SIGKILL)
        start.wait()
    found = dict.fromkeys(cases, "")
    for rank in range(size):
        file = folder / f"{rank}.json"
        errors = json.loads(file.read_text()) if file.is_file() else {}
        outputs = [file.read_text() for file in (folder / "start.out", folder / f"{rank}.out") if file.is_file()]
        for name in (name for name, (ranks, *_) in cases.items() if rank < ranks):
            missing = "".join([late, *outputs, f"\nprocess {rank} did not run {name!r}"])
            error = errors.get(name, missing)
            found[name] += error and f"process {rank}: {error}\n"
    return found


def main(size, folder):
    """Fork the processes and wait; if one fails, the others, which wait for it, get two seconds."""
    import torch._dynamo  # noqa: F401 - otherwise each process imports it at its first operator, which takes a second

    cases = json.loads((folder / "cases.json").read_text())
    for _, module, *_ in cases.values():
        importlib.import_module(module)
    warnings.filterwarnings("ignore", message=".*fork")  # newer Pythons warn if any library has started a thread
    for rank in range(size):
        if not os.fork():
            run_cases(rank, size, folder, cases)
            os._exit(0)
    for _ in range(size):
        if os.wait()[1]:
            time.sleep(2)
            break


def run_cases(rank, size, folder, cases):
    """Run the cases as one of the processes; exit after an error that the others can't notice."""
    import torch
    from torch import distributed

    from subquad.parallel import ContextGroup

    with (folder / f"{rank}.out").open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    distributed.init_process_group("gloo", store, timedelta(seconds=SECONDS), world_size=size, rank=rank)
    sizes = {ranks: distributed.new_group(range(ranks)) for ranks in sorted({ranks for ranks, *_ in cases.values()})}
    groups = {ranks: ContextGroup(made) for ranks, made in sizes.items() if rank < ranks}
    errors = {}
    for name, (ranks, module, function, *arguments) in cases.items():
        if rank >= ranks:
            continue
        known = True
        try:
            getattr(sys.modules[module], function)(groups[ranks], *arguments)
            errors[name] = ""
        except Exception as error:
            errors[name] = traceback.format_exc()
            known = isinstance(error, AssertionError)
        (folder / f"{rank}.json").write_text(json.dumps(errors))
        if not known:
            os._exit(1)  # a normal exit would wait for the other processes
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
