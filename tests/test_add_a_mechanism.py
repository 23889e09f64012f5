"""docs/add-a-mechanism.md works as it stands: its blocks become a package, and nothing else in the library changes."""

import ast
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from subquad import attention
from subquad.attention import Attention, mechanism, names
from subquad.cli import main
from subquad.cli.listing import markdown
from subquad.testing import AttentionContract, assert_exact
from tests.attention import test_base as habits

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add-a-mechanism.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
CONSOLE = "\n".join(re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
COMMANDS = [line.removeprefix("python -m my_attention ") for line in CONSOLE if "-m my_attention" in line]
# `aot_eager` asks the same of the file as inductor, and takes seconds less.
LAWS = [name for name in dir(AttentionContract) if name.startswith("test_") and "inductor" not in name]
FEW = [name for name in LAWS if re.match("test_(the_oracle|weights|definition|split|token_by_token|padding)_", name)]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """Return a folder with the page's files, in which they are imported, registered and at last forgotten again."""
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
        "run": {"steps": 2, "eval_every": 2, "eval_windows": 2, "sample_tokens": 5, "device": "cpu"},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    (folder / "others.md").write_text(markdown(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr(Attention, "registry", {name: mechanism(name) for name in names()})
        for name in ("test_fading", "test_echo"):
            importlib.import_module(name)
        yield folder
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("my_attention", "test_fading", "test_echo", "use")
    ]:
        del sys.modules[name]


def test_the_page_has_the_files_and_commands_that_are_tested():
    own = {f"my_attention/{name}.py" for name in ("fading", "echo", "__main__")}
    assert set(FILES) == own | {"test_fading.py", "test_echo.py", "use.py"}
    assert {command.split()[0] for command in COMMANDS} == {"list", "cost", "show", "train", "generate"}
    assert "python -m pytest test_fading.py test_echo.py" in CONSOLE


@pytest.mark.parametrize(("name", "law"), [("fading", law) for law in LAWS] + [("echo", law) for law in FEW])
def test_the_contract_is_kept(name, law, tmp_path):
    test = getattr(getattr(sys.modules[f"test_{name}"], f"Test{name.title()}")(), law)
    test(**{"tmp_path": tmp_path} if "tmp_path" in inspect.signature(test).parameters else {})


def test_a_decoder_is_built_with_it_and_again_from_a_file(place, capsys):
    use = runpy.run_path("use.py")
    assert re.fullmatch(r"[\d,]+ bytes remember 100 tokens\n", capsys.readouterr().out)
    use["config"].to_file("model.yaml")
    again = use["Decoder"](use["DecoderConfig"].from_file("model.yaml"))
    again.load_state_dict(use["decoder"].state_dict())
    tokens = torch.randint(0, 256, (1, 40))
    assert_exact(again(tokens)[0], use["decoder"](tokens)[0])
    assert [type(layer.attention).__name__ for layer in again.layers] == ["Fading", "Full"]
    assert again.layers[0].attention.config.half_life == 8.0


def test_every_command_knows_it(place, capsys, monkeypatch):
    outputs = {}
    for command in [*COMMANDS, "list", "list --markdown"]:
        tiny = ["--config", "tiny.yaml"] * command.startswith("train")
        monkeypatch.setattr(sys, "argv", ["my_attention", *shlex.split(command), *tiny])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("my_attention", run_name="__main__")
        assert end.value.code == 0, command
        outputs[command] = capsys.readouterr().out
    of = {command.partition(" --")[0]: text for command, text in outputs.items()}
    assert re.search(r"fading +every earlier token, the", outputs["list"])
    assert re.search(r"half_life +float +16\.0 +Tokens after which", of["list fading"])
    assert re.search(r"fading +causal +all +$", outputs["list --laws"], re.MULTILINE)
    assert re.search(r"fading +1,024", of["cost"])
    assert (place / "fading.png").read_bytes().startswith(b"\x89PNG")
    assert "def main(" in of["generate runs/fading"]
    run = yaml.safe_load((place / "runs/fading/config.yaml").read_text(encoding="utf-8"))
    assert (run["model"]["attention"], run["model"]["options"]) == ("fading", {"fading": {"half_life": 8.0}})
    assert (place / "runs/fading/model.safetensors").is_file()
    others = [
        line for line in outputs["list --markdown"].splitlines() if not line.startswith(("| `fading`", "| `echo`"))
    ]
    assert others == (place / "others.md").read_text(encoding="utf-8").splitlines(), (
        "the other mechanisms are what they were"
    )

    monkeypatch.delitem(Attention.registry, "fading")  # as in a program that does not import it
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "runs/fading", "--prompt", "def"])
    assert re.search(r"unknown attention 'fading'; .*valid: .*linear", capsys.readouterr().err)


def test_it_has_the_habits_of_the_folder():
    """`test_base` tests more of them where the files are in the repository."""
    for name in ("fading", "echo"):
        habits.test_every_mechanism_says_what_it_is_and_where_it_is_from(name)
        habits.test_every_option_has_a_docstring(attention.mechanism(name).Config)
        habits.test_copies_and_pickles_compute_the_same(name)
        habits.test_dropout_acts_in_training_only(name)
    code = [ast.parse(FILES[f"my_attention/{name}.py"]) for name in ("fading", "echo")]
    imports = {n.module for file in code for n in ast.walk(file) if isinstance(n, ast.ImportFrom)}
    allowed = {f"subquad.attention.{name}" for name in habits.SHARED}
    used = {name for name in imports if name.startswith("subquad.attention")}
    assert {re.sub(r"memories\..*", "memories", name) for name in used} <= allowed


@pytest.mark.slow
def test_in_the_repository_it_is_two_files_and_a_line(tmp_path):
    """In a copy: the tests that hold every mechanism to the folder's habits, and the directions of imports."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("subquad", "benchmarks", "experiments"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    shutil.copytree(ROOT / "tests" / "attention", tmp_path / "tests" / "attention", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = tmp_path / "subquad" / "attention"
    (folder / "fading.py").write_text(FILES["my_attention/fading.py"], encoding="utf-8")
    facade = (folder / "__init__.py").read_text(encoding="utf-8")
    line = "    from subquad.attention.fading import Fading\n"
    facade = facade.replace("    from subquad.attention.full", f"{line}    from subquad.attention.full")
    (folder / "__init__.py").write_text(facade.replace('    "Full",', '    "Fading",\n    "Full",'), encoding="utf-8")
    test = re.sub(r"^import my_attention.*\n", "", FILES["test_fading.py"], flags=re.MULTILINE)
    (tmp_path / "tests" / "attention" / "test_fading.py").write_text(test, encoding="utf-8")

    def python(*arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    chosen = "(fading or Fading or files_of_the_folder or is_of_a_mechanism) and not TestFading or weights_are"
    where = ("tests/attention/test_base.py", "tests/attention/test_fading.py")
    assert re.search(
        r"^\d\d passed", python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *where), re.M
    )
    linter = "import sys; sys.argv[1:] = []; from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert "0 broken" in python("-c", linter)
