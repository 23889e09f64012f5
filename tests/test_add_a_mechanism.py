"""docs/add-a-mechanism.md is followed as it stands: its blocks become a package, and nothing else in the library moves.

What imports the package does so in processes of its own: the mechanism must not stay in this one's registry.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from subquad import attention
from subquad.cli import main
from subquad.cli.listing import markdown
from subquad.testing import AttentionContract

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add-a-mechanism.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
CONSOLE = "\n".join(re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
COMMANDS = [line.removeprefix("python -m my_attention ") for line in CONSOLE if "-m my_attention" in line]
WARNINGS = ("-W", "error", "-W", "ignore:`torch.jit.script:DeprecationWarning")
"""As for the library's own tests."""

RUN_COMMANDS = """
import contextlib, io, json, runpy, shlex, sys

outputs = {}
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = shlex.split(command)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_module("my_attention", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    assert status == 0, (command, status)
    outputs[command] = text.getvalue()
print(json.dumps(outputs))
"""
"""What `python -m my_attention` does, for several commands in one process."""

ROUND_TRIP = """
import torch

from subquad.testing import assert_exact
from use import Decoder, DecoderConfig, config, decoder

config.to_file("model.yaml")
again = Decoder(DecoderConfig.from_file("model.yaml"))
again.load_state_dict(decoder.state_dict())
tokens = torch.randint(0, 256, (1, 40))
assert_exact(again(tokens)[0], decoder(tokens)[0])
print(*(type(layer.attention).__name__ for layer in again.layers), again.layers[0].attention.config.half_life)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the page's files, a text, and what makes a run tiny."""
    folder = tmp_path_factory.mktemp("mechanism")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my_attention" / "__init__.py").touch()
    (folder / "text.txt").write_text("".join(f"def main(argv):  # line {i}\n" for i in range(200)), encoding="utf-8")
    tiny = {
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "options": {"fading": {"half_life": 8.0}}},
        "data": {"path": "text.txt", "tokenizer": "bytes", "cache": "cache"},
        "batch": {"length": 32, "size": 2},
        "schedule": {"warmup": 1},
        "run": {"steps": 3, "eval_every": 3, "eval_windows": 2, "sample_tokens": 5, "device": "cpu"},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python in a process of its own that imports from `folder` before all else."""
    # Parallel tests set COLUMNS, by which the tables would be wrapped.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name != "COLUMNS"
    }
    environment |= {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_page_has_the_files_and_commands_that_are_tested():
    assert set(FILES) == {"my_attention/fading.py", "my_attention/__main__.py", "test_fading.py", "use.py"}
    assert {command.split()[0] for command in COMMANDS} == {"list", "cost", "show", "train", "generate"}
    assert "python -m pytest test_fading.py" in CONSOLE


def test_the_contract_is_kept(place):
    """All of its laws, but inductor's compilation: `aot_eager` asks the same of the file and takes seconds less."""
    options = ("-q", "-p", "no:cacheprovider", *WARNINGS, "-k", "not inductor")
    done = python(place, "-m", "pytest", *options, "test_fading.py")
    laws = [name for name in dir(AttentionContract) if name.startswith("test_") and "inductor" not in name]
    assert re.search(rf"^{len(laws)} passed, 1 deselected", done.stdout, re.MULTILINE), done.stdout


def test_a_decoder_is_built_with_it_and_again_from_a_file(place):
    first, second = python(place, "-c", ROUND_TRIP).stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ bytes remember 100 tokens", first)
    assert second == "Fading Full 8.0"


def test_every_command_knows_it(place, capsys):
    commands = [command + " --config tiny.yaml" * command.startswith("train") for command in COMMANDS]
    done = python(place, "-c", RUN_COMMANDS, json.dumps([*commands, "list", "list --markdown"]))
    outputs = json.loads(done.stdout)
    assert set(commands) < set(outputs)
    of = {command.partition(" --")[0]: text for command, text in outputs.items()}
    assert "every earlier token, the nearer ones more" in outputs["list"]
    assert re.search(r"half_life +float +16\.0 +Tokens after which", of["list fading"])
    assert re.search(r"fading +causal( +yes){15}", outputs["list --laws"])
    assert re.search(r"fading +1,024", of["cost"])
    assert (place / "fading.png").read_bytes().startswith(b"\x89PNG")
    assert "def main(" in of["generate runs/fading"]
    run = yaml.safe_load((place / "runs/fading/config.yaml").read_text(encoding="utf-8"))
    assert (run["model"]["attention"], run["model"]["options"]) == ("fading", {"fading": {"half_life": 8.0}})
    assert run["run"]["steps"] == 3
    assert (place / "runs/fading/model.safetensors").is_file()
    others = [line for line in outputs["list --markdown"].splitlines() if not line.startswith("| `fading`")]
    assert others == markdown().splitlines(), "the other mechanisms are what they were"

    with pytest.raises(SystemExit, match="2"):  # this process has not imported it
        main(["generate", str(place / "runs/fading"), "--prompt", "def"])
    assert re.search(r"unknown attention 'fading'; .*valid: .*linear", capsys.readouterr().err)


@pytest.mark.slow
def test_in_the_repository_it_is_two_files_and_a_line(place, tmp_path):
    """In a copy: what is said there of imports, and the tests that hold every mechanism to the folder's habits."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("subquad", "benchmarks", "experiments"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copytree(ROOT / "tests" / "attention", tmp_path / "tests" / "attention", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = tmp_path / "subquad" / "attention"
    (folder / "fading.py").write_text(FILES["my_attention/fading.py"], encoding="utf-8")
    facade = (folder / "__init__.py").read_text(encoding="utf-8")
    line = "from subquad.attention.fading import Fading\n"
    facade = facade.replace("from subquad.attention.full", f"{line}from subquad.attention.full")
    (folder / "__init__.py").write_text(facade.replace('    "Full",', '    "Fading",\n    "Full",'), encoding="utf-8")
    test = re.sub(r"^import my_attention.*\n", "", FILES["test_fading.py"], flags=re.MULTILINE)
    (tmp_path / "tests" / "attention" / "test_fading.py").write_text(test, encoding="utf-8")
    habits = ("tests/attention/test_registry.py", "tests/attention/test_modules.py", "tests/attention/test_fading.py")
    chosen = "(fading or Fading or files_of_the_folder or is_of_a_mechanism) and not law"
    done = python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"{chosen} or law_01", *habits)
    assert re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout
    linter = "import sys; sys.argv[1:] = []; from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert "0 broken" in python(tmp_path, "-c", linter).stdout


def test_this_process_does_not_know_it():
    assert "fading" not in attention.names()
    assert "my_attention" not in sys.modules
