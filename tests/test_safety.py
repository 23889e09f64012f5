"""No code of the repository executes the content of a file, or reads JSON, YAML, arrays or images without bounds."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(file for room in ("subquad", "benchmarks", "experiments") for file in (ROOT / room).rglob("*.py"))
PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
OWN_JSON = "JSON that the same function or program has written"
ALLOWED = {
    ("data/image_files.py", "Image.open"): "the one place that opens images, with two formats and a limit",
    ("data/lra/made.py", "json"): OWN_JSON,
    ("data/vocabularies.py", "json"): OWN_JSON,
    ("evaluation/harness.py", "json"): OWN_JSON,
    ("parsing.py", "json"): "the one place that reads JSON",
    ("parsing.py", "yaml.load"): "the one place that reads YAML",
    ("benchmarks/gpu.py", "json"): OWN_JSON,
    ("benchmarks/gpu_steps.py", "json"): OWN_JSON,
    ("experiments/harness/measure.py", "json"): OWN_JSON,
    ("experiments/harness/train.py", "json"): OWN_JSON,
    ("experiments/latte_table3/experiment.py", "json"): OWN_JSON,
    ("experiments/harness/units.py", "exec_module"): "runs the experiment's own code, as asked",
    ("serving/gate.py", "json"): "a body that is no longer than ServeConfig.max_body; RecursionError is caught",
}
"""Exceptions, with the reason for each."""


def has(node: ast.Call, name: str, value: object) -> bool:
    """Return whether the call passes the constant `value` as the keyword `name`."""
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value == value for k in node.keywords)


def unsafe(source: str) -> list[tuple[str, int]]:
    """Return each forbidden call or import with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [(module, node.lineno) for module in modules if module.partition(".")[0] in PICKLES]
            if isinstance(node, ast.ImportFrom) and node.module in ("json", "yaml", "os", "numpy", "torch"):
                hidden = {alias.name for alias in node.names} & {"load", "loads", "safe_load", "system", "popen"}
                found += [(f"{node.module}.{name}", node.lineno) for name in sorted(hidden)]
        elif isinstance(node, ast.Call):
            found += [(what, node.lineno) for what in unsafe_call(node)]
    return found


def unsafe_call(node: ast.Call) -> list[str]:
    """Return the rules that a call breaks; the dotted name that is called decides most of them."""
    name = ast.unparse(node.func)
    last, trusts_nothing = name.rpartition(".")[2], has(node, "trust_remote_code", False)
    reasons = {
        name: name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"),
        "json": name in ("json.load", "json.loads"),
        "yaml.safe_load": name == "yaml.safe_load",
        "yaml.load": name.startswith("yaml.") and "load" in last and last != "safe_load",
        "torch.load": name == "torch.load" and not has(node, "weights_only", True),
        "np.load": name in ("np.load", "numpy.load") and not has(node, "allow_pickle", False),
        "Image.open": name.endswith("Image.open"),
        "exec_module": last == "exec_module",
        "Tokenizer.from_file": name == "Tokenizer.from_file",
        "extractall": (last in ("extract", "extractall") and not has(node, "filter", "data"))
        or name == "shutil.unpack_archive",
        "shell": any(k.arg == "shell" and not has(node, "shell", False) for k in node.keywords),
        "trust_remote_code": any(k.arg == "trust_remote_code" for k in node.keywords) and not trusts_nothing,
        "from_pretrained": ".Auto" in f".{name}" and last == "from_pretrained" and not trusts_nothing,
    }  # fmt: skip
    return [reason for reason, wrong in reasons.items() if wrong]


@functools.cache
def all_found():
    names = {path: path.relative_to(ROOT).as_posix().removeprefix("subquad/") for path in FILES}
    return [(name, *found) for path, name in names.items() for found in unsafe(path.read_text(encoding="utf-8"))]


def test_the_library_reads_safely():
    assert len(FILES) > 100
    assert [found for found in all_found() if found[:2] not in ALLOWED] == []


def test_every_exception_is_needed():
    assert set(ALLOWED) == {found[:2] for found in all_found()}


FORBIDDEN = {
    "pickle": ["import pickle", "from pickle import loads"], "cloudpickle": ["import cloudpickle as c"],
    "eval": ["eval(text)"], "exec": ["exec(text)"], "__import__": ["__import__(name)"], "json": ["json.loads(text)"],
    "yaml.load": ["yaml.load(text, Loader=yaml.SafeLoader)", "yaml.unsafe_load(text)", "from yaml import load"],
    "yaml.safe_load": ["yaml.safe_load(text)"], "torch.load": ["torch.load(f)", "torch.load(f, weights_only=False)"],
    "np.load": ["np.load(f)", "np.load(f, allow_pickle=True)"], "Image.open": ["Image.open(f)"],
    "Tokenizer.from_file": ["Tokenizer.from_file(f)"], "os.system": ["os.system(command)"],
    "extractall": ["a.extractall(folder)", "a.extract(m, folder, filter=chosen)", "shutil.unpack_archive(f)"],
    "shell": ["subprocess.run(command, shell=True)", "subprocess.run(command, shell=chosen)"],
    "from_pretrained": ["AutoConfig.from_pretrained(folder)"], "exec_module": ["spec.loader.exec_module(module)"],
    "trust_remote_code": ["transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)",
                          "build(folder, trust_remote_code=chosen)"],
}  # fmt: skip
SAFE = (
    "model.eval()", "re.compile(pattern)", "torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)",
    "a.extractall(folder, filter='data')", "AutoConfig.from_pretrained(folder, trust_remote_code=False)",
    "subprocess.run(command)",
)  # fmt: skip


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_rules_see_what_they_forbid(what):
    for source in FORBIDDEN[what]:
        assert what in [reason for reason, _ in unsafe(source)], source


@pytest.mark.parametrize("source", SAFE)
def test_the_rules_let_pass_what_is_safe(source):
    assert unsafe(source) == []
