"""The extras: what each brings, what works without any, and the error where one is missing."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from subquad.cli import NEEDED
from subquad.extras import INCLUDES, PACKAGES, is_installed, needed
from subquad.lazy import facade

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {"PIL": "pillow", "lm_eval": "lm-eval", "prometheus_client": "prometheus-client", "yaml": "pyyaml"}
"""Names on PyPI, where they are not those that are imported."""


def fresh(code: str) -> list[str]:
    """Run code in a process that has no package of an extra, nor its version; return the lines that it prints."""
    blocked = [package for packages in PACKAGES.values() for package in packages]
    block = f"""
        import sys
        from importlib.metadata import Distribution, PackageNotFoundError
        blocked, from_name = {[*blocked, "huggingface_hub", "scipy"]}, Distribution.from_name
        sys.modules.update(dict.fromkeys(blocked))
        def found(name):
            if name in blocked:
                raise PackageNotFoundError(name)
            return from_name(name)
        Distribution.from_name = found
    """
    command = [sys.executable, "-c", textwrap.dedent(block) + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_layer_trains_decodes_and_is_judged_without_any_extra(tmp_path):
    lines = fresh(f"""
        import torch
        from subquad import State, attention, audit, evaluation, generation, models, ops, parallel, testing
        from subquad.attention.laws import Law
        from subquad.cli import main
        from subquad.models import Decoder, DecoderConfig

        layer = attention.Latte(dim=16, num_heads=2, num_latents=8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(2, 12, 16)
        losses = []
        for _ in range(3):
            loss = (layer(x)[0] - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(losses[2] < losses[0])
        y, state = layer(x[:, :5])
        state.save("{tmp_path}/state.safetensors")
        z, _ = layer(x[:, 5:], State.load("{tmp_path}/state.safetensors"))
        print(torch.allclose(torch.cat([y, z], 1), layer(x)[0], atol=1e-5))
        for law in (Law.DEFINITION, Law.SPLIT, Law.NO_FUTURE):
            print(testing.check_law(law, "latte", num_latents=8))
        model = Decoder(DecoderConfig(vocab_size=20, dim=16, num_layers=1, num_heads=2, attention="window"))
        print(len(list(generation.generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4))))
        print(audit(model).passed)
        print(evaluation.evaluate(model, torch.arange(40) % 20, length=8).tokens)
        print(main(["list", "latte"]), main(["doctor"]))
    """)
    assert lines[:8] == ["True", "True", "[]", "[]", "[]", "4", "True", "39"]
    assert lines[-1] == "0 0"
    assert "| dim | int | required | Model width D. |" in lines
    assert "| train | subquad train, " in "\n".join(lines)


def test_what_lacks_its_extra_says_in_one_line_what_to_install(tmp_path):
    (tmp_path / "a.yaml").write_text("a: 1\n", encoding="utf-8")
    lines = fresh(f"""
        import sys
        from subquad.cli import COMMANDS, NEEDED, main
        from subquad.config import read_mapping
        sys.stderr = sys.stdout
        print(*(main([command, "x"]) for command in COMMANDS if NEEDED[command]))
        def tried(code):
            try:
                exec(code)
            except ImportError as error:
                print(error)
        for code in ("from subquad import hf", "import subquad.hf", "from subquad.training import train",
                     "from subquad.data import prepare", "from subquad.adaptation import extend",
                     "import subquad.train_and_report", "from subquad.testing import AttentionContract",
                     "read_mapping('{tmp_path}/a.yaml')"):
            tried(code)
    """)
    with_extra = {name: extra for name, extra in NEEDED.items() if extra}
    commands, rest = lines[: len(with_extra)], lines[len(with_extra) :]
    for line, (command, extra) in zip(commands, with_extra.items(), strict=True):
        assert line.startswith(f"error: subquad {command} needs ")
        assert line.endswith(f"which is not installed: {sys.executable} -m pip install 'subquad[{extra}]'")
    assert rest[0] == " ".join("1" for _ in with_extra)
    starts = [
        "subquad.hf needs transformers", "subquad.hf needs transformers", "subquad.training.train needs ",
        "subquad.data.prepare needs tokenizers", "subquad.adaptation.extend needs ",
        "subquad.train_and_report needs rich", "AttentionContract needs hypothesis",
        f"reading {tmp_path}/a.yaml needs yaml",
    ]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(rest[1:], starts, strict=True)] == starts


def test_the_packages_of_each_extra_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [Requirement(line).name for line in project["dependencies"]] == ["torch", "numpy", "safetensors"]
    declared = project["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        found = [Requirement(line) for line in declared[extra]]
        assert {r.name for r in found if r.name != "subquad"} == {DISTRIBUTIONS.get(p, p) for p in packages}, extra
        assert [r.extras for r in found if r.name == "subquad"] == ([{INCLUDES[extra]}] if extra in INCLUDES else []), (
            extra
        )
    (everything,) = (Requirement(line) for line in declared["all"])
    assert everything.extras == set(PACKAGES) - {"hf", "train"}, "which the others include"


def test_a_page_says_which_command_needs_which_extra():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `?(\w+)`? \| (.*) \|$", page, re.MULTILINE))
    assert {*PACKAGES, "none", "all"} <= set(rows)
    for command, extra in NEEDED.items():
        named = [name for name in rows if f"`subquad {command}`" in rows[name]]
        assert named == ([] if extra == "train" else [extra or "none"]), command


def test_the_extra_of_what_asks_is_named_if_it_has_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    for extra, named in (("serve", "serve"), ("testing", "train"), (None, "train")):
        match = rf"^it needs rich, which is not installed: .* 'subquad\[{named}\]'$"
        with pytest.raises(ImportError, match=match), needed("it", extra):
            import rich  # noqa: F401


def test_other_errors_of_an_import_pass(monkeypatch):
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nowhere'"), needed("it"):
        import nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'rich\.nowhere'"), needed("it"):
        import rich.nowhere  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'rich'"), needed("it"):
        from rich import nothing  # noqa: F401


def test_a_facade_says_which_name_needs_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"^mine\.name needs tensorboard, .* 'subquad\[train\]'$"):
        facade("mine", {"name": "tensorboard.program"})("name")


def test_a_stand_in_is_not_an_installed_package(monkeypatch):
    assert is_installed("torch")
    assert not is_installed("no_such_package")
    monkeypatch.setitem(sys.modules, "stand_in", type(sys)("stand_in"))
    assert not is_installed("stand_in")
