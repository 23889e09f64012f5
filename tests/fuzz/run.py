"""The fuzzer: damaged inputs for every target.

`python -m tests.fuzz.run --minutes 10` tries all targets, each in a child process with limits of memory and of seconds
per input, prints the outcomes, and keeps every input that found a fault in `tests/fuzz/found`. `--target NAME` tries
one target. A target and a number determine an input.
"""

import argparse
import faulthandler
import hashlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.mutate import mutated

FOUND = Path(__file__).with_name("found")
ROOT = Path(__file__).resolve().parents[2]
MEMORY = 8 << 30
"""Bytes of address space of a child, of which torch takes some."""
PEAK = 1 << 30
"""Bytes that all inputs together may add to a child's memory."""
SECONDS = 30.0
"""Limit for one input; resuming a run takes one or two."""
KEPT = 20_000
"""Largest input in bytes that is kept as a file; larger ones are named by their number."""


class Input(NamedTuple):
    """New content for a file of a valid folder."""

    number: int
    file: str
    content: bytes


class Outcome(NamedTuple):
    """`kind` is "read" or the name of an exception; `fault` describes a fault, or is None."""

    kind: str
    fault: str | None


class Tried:
    """A target with its valid folder in `home`."""

    def __init__(self, name: str, home: Path) -> None:
        from tests.fuzz.targets import TARGETS

        self.name, self.target = name, TARGETS[name]
        self.folder, self.valid = home / "folder", home / "valid"
        self.folder.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.target.make(self.folder)
        shutil.copytree(self.folder, self.valid)
        names = (file.relative_to(self.folder) for file in self.folder.glob(self.target.files) if file.is_file())
        self.files = sorted(name.as_posix() for name in names)
        assert self.files, name

    def restored(self) -> "Tried":
        """Restore the valid folder."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.valid, self.folder)
        return self

    def whole(self) -> Input:
        """Return an input that changes nothing."""
        return Input(0, self.files[0], (self.valid / self.files[0]).read_bytes())

    def input(self, number: int) -> Input:
        """Return input `number`."""
        rng = random.Random(f"{self.name} {number}")
        file = rng.choice(self.files)
        return Input(number, file, mutated(file, (self.valid / file).read_bytes(), rng))

    def attempt(self, tried: Input) -> Outcome:
        """Read the folder with this input."""
        self.restored()
        (self.folder / tried.file).write_bytes(tried.content)
        if self.target.seal is not None and tried.number % 4:
            try:
                self.target.seal(self.folder)
            except Exception:
                (self.folder / tried.file).write_bytes(tried.content)  # too damaged to seal
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.target.read(self.folder)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return Outcome(type(error).__name__, self.fault(error, tried.file))
        return Outcome("read", None)

    def fault(self, error: BaseException, file: str) -> str | None:
        """Describe the fault of an error that a damaged file caused, or return None."""
        told = "".join(traceback.format_exception(error))
        if not isinstance(error, self.target.raises):
            return told
        if self.target.named and not any(name in str(error) for name in (str(self.folder), Path(file).name)):
            return f"names no file: {told}"
        return None


def signature(fault: str) -> str:
    """Return the exception and the last two frames in subquad, which are equal for inputs that find the same fault."""
    lines = fault.strip().splitlines()
    ours = [line.strip() for line in lines if f'File "{ROOT / "subquad"}' in line]
    return " ".join([lines[-1].partition(":")[0], *ours[-2:]])


def keep(name: str, tried: Input) -> str:
    """Keep an input as a file if it is small, and return its place or number."""
    if len(tried.content) > KEPT:
        return f"input {tried.number} of {name}, {tried.file} with {len(tried.content):,} bytes"
    digest = hashlib.sha256(tried.content).hexdigest()[:8]
    place = FOUND / name / f"{digest}-{tried.file.replace('/', '~')}"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(tried.content)
    return str(place)


def kept(name: str) -> list[Input]:
    """Return a target's inputs that found a fault before."""
    files = sorted((FOUND / name).glob("*"))
    return [Input(1, file.name.partition("-")[2].replace("~", "/"), file.read_bytes()) for file in files]


def peak_bytes() -> int:
    """Return the most memory that this process has held. (`ru_maxrss` begins with that of the process it came from.)"""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def child(name: str, start: int, seconds: float, home: Path, module: str, sender: Any) -> None:
    """Try inputs from `start` on; send the number of each, then its kind and its fault."""
    with (home / "told").open("w") as told:  # also for crashes
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    os.environ |= {"SUBQUAD_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "1"}
    import_module(module)
    faulthandler.enable()
    logging.disable()
    tried = Tried(name, home / "child")
    tried.attempt(tried.whole())  # imports and warms up
    before = peak_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    known: set[str] = set()
    end, number = time.monotonic() + seconds, start
    while time.monotonic() < end:
        sender.send(number)
        now = tried.input(number)
        kind, fault = tried.attempt(now)
        grown = peak_bytes() - before
        if grown > PEAK and fault is None:
            fault, before = f"took {grown:,} bytes of memory", before + grown
        if fault is not None:
            place = keep(name, now) if signature(fault) not in known else f"input {number} of {name}, as one before"
            known.add(signature(fault))
            fault = f"{place}\n{fault}"
        sender.send((kind, fault))
        number += 1
    os._exit(0)  # regardless of threads that a target has started


def run(name: str, seconds: float, start: int = 0, module: str = "tests.fuzz.targets") -> tuple[Counter, list[str]]:
    """Try a target of a module for `seconds`, and return counts by outcome and the faults."""
    kinds: Counter[str] = Counter()
    faults: list[str] = []
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            home = Path(folder)
            last, why = _watch((name, start, left, home, module), kinds, faults)
            if why is None:
                break
            faults.append(f"{keep(name, Tried(name, home / 'again').input(last))}\n{why}")
            kinds["died"] += 1
            start = last + 1
    return kinds, faults


def _watch(asked: tuple[str, int, float, Path, str], kinds: Counter, faults: list[str]) -> tuple[int, str | None]:
    """Run a child until its time is over or it dies; return its last input's number, and why it died or None."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=child, args=(*asked, sender))
    process.start()
    sender.close()
    last, patience = asked[1], 180.0
    try:
        while receiver.poll(patience):
            told, patience = receiver.recv(), SECONDS
            if isinstance(told, int):
                last = told
                continue
            kinds[told[0]] += 1
            faults += [told[1]] if told[1] else []
        return last, f"hangs: no answer in {patience:g} s"
    except EOFError:  # it has ended
        process.join(SECONDS)
    finally:
        process.kill()
        process.join()
        receiver.close()
    if process.exitcode == 0:
        return last, None
    return last, f"dies with status {process.exitcode}: {(asked[3] / 'told').read_text()[-2000:]}"


def summary(names: list[str], seconds: float, start: int = 0) -> list[str]:
    """Try targets for `seconds` in all, print a line for each, and return the faults."""
    found: list[str] = []
    for name in names:
        kinds, faults = run(name, seconds / len(names), start)
        shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        print(f"{name:<16} {sum(kinds.values()):>7} inputs, {len(faults)} faults: {shown}", flush=True)
        for fault in dict.fromkeys(fault.strip().splitlines()[-1] for fault in faults):
            print(f"    {fault[:300]}", flush=True)
        found += [f"{name}: {fault}" for fault in faults]
    return found


def main() -> int:
    """Try one or all targets. Return 1 if there is a fault."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    chosen = parser.parse_args()
    return 1 if summary(chosen.target or list(TARGETS), chosen.minutes * 60, chosen.start) else 0


if __name__ == "__main__":
    raise SystemExit(main())
