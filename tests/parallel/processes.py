"""Real processes with gloo: one start of them, which takes seconds, runs many cases; each is a test of its own.

As a script it is one of the processes: `python processes.py RANK SIZE FOLDER`.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
"""A process that waits longer for another one gives up."""


def run_processes(size, cases, folder, seconds=150):
    """What went wrong in each case, by its name: tracebacks of all processes, empty where nothing did.

    `cases` are calls of functions as `name: [ranks, module, function, *arguments]`: the first `ranks` processes make a
    group, which is the function's first argument.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__]
    outputs = [(folder / f"{rank}.out").open("w") for rank in range(size)]
    children = [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], env=environment, stdout=out, stderr=out)
        for rank, out in enumerate(outputs)
    ]
    end, late = time.monotonic() + seconds, ""
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):  # the others wait for it
            time.sleep(2)
            break
        if time.monotonic() > end:
            late = f"the processes did not end within {seconds} seconds\n"
            break
        time.sleep(0.05)
    for child, out in zip(children, outputs, strict=True):
        child.kill()
        child.wait()
        out.close()
    found = dict.fromkeys(cases, "")
    for rank in range(size):
        mine = [name for name, (ranks, *_) in cases.items() if rank < ranks]
        file = folder / f"{rank}.json"
        errors = json.loads(file.read_text()) if file.is_file() else {}
        for name in mine:
            if name not in errors:
                text = late + (folder / f"{rank}.out").read_text() + f"\nprocess {rank} did not run {name!r}"
                errors[name] = text
            found[name] += errors[name] and f"process {rank}: {errors[name]}\n"
    return found


def main(rank, size, folder):
    """Run the cases as one of the processes; an error that others cannot know of ends the run."""
    import importlib

    import torch
    from torch import distributed

    from subquad.parallel import ContextGroup

    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    distributed.init_process_group("gloo", store, timedelta(seconds=SECONDS), world_size=size, rank=rank)
    cases, errors = json.loads((folder / "cases.json").read_text()), {}
    sizes = {ranks: distributed.new_group(range(ranks)) for ranks in sorted({ranks for ranks, *_ in cases.values()})}
    groups = {ranks: ContextGroup(made) for ranks, made in sizes.items() if rank < ranks}
    for name, (ranks, module, function, *arguments) in cases.items():
        if rank >= ranks:
            continue
        try:
            getattr(importlib.import_module(module), function)(groups[ranks], *arguments)
            errors[name] = ""
        except Exception as error:
            errors[name] = traceback.format_exc()
            if not isinstance(error, AssertionError):
                break
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(errors))
    if len(errors) < len([ranks for ranks, *_ in cases.values() if rank < ranks]):
        os._exit(1)  # the way out would wait for the other processes
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
