"""Plant small faults in a copy of the package, and report which of them no test notices.

`python -m tests.fuzz.planted --count 100 --seed 1` changes one expression or statement of `subquad/` at a time, spread
over the rooms, and runs the tests of the same name, then those that import the module, then those of its room. A
survivor is equivalent code or a missing test. Results are kept in a JSON file, so that a second call continues;
`--again` tries what was not caught.
"""

import argparse
import ast
import importlib.util
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = ("__pycache__", ".*", "runs")
LOADED = ("torch._dynamo", "torch.utils.flop_counter", "transformers.modeling_utils", "pytest")  # what most tests need
ENVIRONMENT = {
    "CI": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "1",
}  # fmt: skip
"""As of tests/conftest.py, which libraries read when they are loaded; with CI, hypothesis draws the same each time."""
MEMORY = 12 << 30  # bytes of address space of a process
PATIENCE = 4  # seconds for a second of processor time
PASSES = (0, 5)  # all tests pass, or none of them is quick
LEFT_OUT = "_triton"  # whose tests take too long: kernels run in Triton's interpreter
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPPOSITES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}
NEVER_WRONG = ("strict", "help", "metavar")  # a check that cannot fire in right code, and words
SYMMETRIC = (*OPPOSITES, "equal", "gcd", "isclose", "lcm", "logaddexp")
LOGGERS = ("logger", "logging", "warnings")
WORDS = ("annotation", "returns", "decorator_list", "bases")


class Mutant(NamedTuple):
    """`before`, the bytes from `start` to `stop` of `file`, becomes `after`."""

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Return what names the mutant in the file of results."""
        return f"{self.file}:{self.line}:{self.start}: {self.before} -> {self.after}"

    def applied(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.after.encode() + source[self.stop :]


class Result(NamedTuple):
    """`outcome` is caught, survived or timeout; `by` is the failing test with its error, or what was run."""

    outcome: str
    by: str
    seconds: float


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node's faulty forms."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield changed(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Slice():
            yield from (changed(node, **{name: None}) for name in ("lower", "upper") if getattr(node, name))
        case ast.Call(func=func, args=args, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg and keyword.arg not in NEVER_WRONG:
                    yield changed(node, keywords=keywords[:i] + keywords[i + 1 :])
            symmetric = ast.unparse(func).rpartition(".")[2] in SYMMETRIC
            if len(args) > 1 and not symmetric and ast.dump(args[0]) != ast.dump(args[1]):
                yield changed(node, args=[args[1], args[0], *args[2:]])
            if isinstance(func, ast.Name) and func.id in OPPOSITES:
                yield changed(node, func=ast.Name(OPPOSITES[func.id]))
            if isinstance(func, ast.Attribute) and func.attr in OPPOSITES:
                yield changed(node, func=changed(func, attr=OPPOSITES[func.attr]))
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are worth changing: no annotations, messages, logging, imports, decorators, f-strings."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in LOGGERS:
            return
        case ast.Expr(value=ast.Call() as call) if not list(parts(call)):
            return
    yield node
    for name, value in ast.iter_fields(node):
        if name in WORDS or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from parts(child)


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in parts(ast.parse(source)):
        for other in changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            bare = isinstance(node, ast.stmt | ast.Slice | ast.Constant)
            after = ast.unparse(other) if bare else f"({ast.unparse(other)})"
            found.append(Mutant(file, node.lineno, start, stop, ast.unparse(node), after))
    return found


def chosen(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the package under `root`, in turn of each room, the same for a seed and a package."""
    rooms: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((root / "subquad").rglob("*.py")):
        file = path.relative_to(root)
        if LEFT_OUT not in file.parts:
            rooms[file.parts[1] if len(file.parts) > 2 else ""] += mutants(file.as_posix(), path.read_bytes())
    rng = random.Random(seed)
    drawn = [rng.sample(found, min(count, len(found))) for _, found in sorted(rooms.items())]
    return [one for one in chain(*zip_longest(*drawn)) if one is not None][:count]


@cache
def imports(test: Path) -> frozenset[str]:
    """Return the modules and names that a test file imports, as `subquad.attention.Latte`."""
    found = set()
    for node in ast.walk(ast.parse(test.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def tests_of(root: Path, file: str) -> list[list[str]]:
    """Return three lists of test files: of the module's name, of those that import it, and the others of its room."""
    module = file.removesuffix(".py").replace("/", ".")
    words = [word.strip("_") for word in module.split(".")[1:]]
    folder = root / "tests" / words[0]
    near = sorted(folder.rglob("test_*.py") if folder.is_dir() else (root / "tests").glob("test_*.py"))
    body = ast.parse((root / file).read_bytes()).body
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    by_word = [test for test in near if any(f"_{word}" in test.stem for word in (words[1:] or words))]
    by_name = [test for test in near if any(name.rpartition(".")[2] in defined for name in imports(test))]
    by_module = [test for test in sorted((root / "tests").rglob("test_*.py")) if module in imports(test)]
    seen: set[Path] = {test for test in chain(near, by_module) if {"triton", "peers"} & set(test.parts)}
    lists = []
    for tests in (by_word, [*by_name, *by_module], near):
        new = [test for test in dict.fromkeys(tests) if test not in seen]
        seen |= set(new)
        lists.append([test.relative_to(root).as_posix() for test in new])
    return lists


def child(root: Path, tests: list[str], seconds: float, told: Path) -> None:
    """Run test files in this process, which ends with pytest's status, until one fails."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with told.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = False  # or each process would compile the package
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "-W", "ignore:Module already imported"]
    status = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(status)


def run(root: Path, tests: list[str], seconds: float) -> Result:
    """Run test files in a process whose processor time is limited; its libraries are loaded already."""
    begin = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        told = Path(folder) / "told"
        process = context.Process(target=child, args=(root, tests, seconds, told))
        process.start()
        process.join(PATIENCE * seconds)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        lines = told.read_text().splitlines() if told.exists() else []
    spent = round(time.monotonic() - begin, 1)
    if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Result("timeout", " ".join(tests), spent)
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Result("survived" if process.exitcode in PASSES else "caught", (failed or lines[-1:] or [""])[0], spent)


def attempt(root: Path, mutant: Mutant, seconds: float) -> Result:
    """Apply a mutant to the copy under `root`, run its tests, and restore the copy."""
    path = root / mutant.file
    source = path.read_bytes()
    compiled = Path(importlib.util.cache_from_source(str(path)))
    lists = tests_of(root, mutant.file)
    path.write_bytes(mutant.applied(source))
    compiled.unlink(missing_ok=True)  # a compiled file is known by its second and size alone
    told, begin = Result("survived", "there is no test", 0.0), time.monotonic()
    try:
        for tests in filter(None, lists):
            told = run(root, tests, seconds)
            if told.outcome != "survived":
                break
    finally:
        path.write_bytes(source)
        compiled.unlink(missing_ok=True)
    return told._replace(seconds=round(time.monotonic() - begin, 1))


def table(results: dict[str, Result]) -> list[str]:
    """Return the lines of the report: what was not caught, and the counts."""
    outcomes = [one.outcome for one in results.values()]
    lines = [f"{outcome:<9} {key}" for key, outcome in zip(results, outcomes, strict=True) if outcome != "caught"]
    return [*lines, ", ".join(f"{outcomes.count(name)} {name}" for name in ("caught", "survived", "timeout"))]


def main() -> None:
    """Plant faults, print each outcome, and the table of those that no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=45.0, help="of processor time, for each list of test files")
    parser.add_argument("--again", action="store_true", help="try those that were not caught before")
    parser.add_argument("--results", type=Path, help="JSON file; beside the system's temporary files by default")
    asked = parser.parse_args()
    kept = asked.results or Path(tempfile.gettempdir()) / f"subquad-planted-{asked.seed}.json"
    results = {key: Result(*values) for key, values in json.loads(kept.read_text()).items()} if kept.exists() else {}
    os.environ |= ENVIRONMENT
    shown: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as home:
        root = Path(home) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for mutant in chosen(root, asked.count, asked.seed):
            known = results.get(mutant.key)
            if known is None or (asked.again and known.outcome != "caught"):
                told = results[mutant.key] = attempt(root, mutant, asked.seconds)
                kept.write_text(json.dumps(results, indent=1))
                print(f"{told.outcome:<9} {told.seconds:>5.1f} s  {mutant.key}\n    {told.by[:150]}", flush=True)
            shown[mutant.key] = results[mutant.key]
        proofs = {one.by.split()[1].partition("[")[0] for one in shown.values() if one.by.startswith("FAILED")}
        anyway = run(root, sorted(proofs), 60 * asked.seconds)
    print("\n".join(table(shown)))
    if anyway.outcome != "survived":
        raise SystemExit(f"a test that caught a fault fails without one too: {anyway.by}")


if __name__ == "__main__":
    main()
