"""The programs in examples/ run as a reader would run them, from one folder and in the order of the README."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from subquad.attention import Attention, mechanism, names

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Run an example in `folder`; return what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SUBQUAD_CACHE", str(folder / "cache"))
    registry = {name: mechanism(name) for name in names()}
    monkeypatch.setattr(Attention, "registry", registry)  # an own mechanism stays in its example

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_there_are_no_examples_but_these():
    names = {"generate_with_a_saved_state", "layer_in_a_module", "own_mechanism", "retrofit_a_llama", "train_on_a_text"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == names


def test_a_layer_in_a_module_learns(run):
    losses = [float(loss) for loss in re.findall(r"([\d.]+) nats", run("layer_in_a_module"))]
    assert losses[-1] < losses[0] / 5


def test_a_text_is_learned_and_its_model_goes_on_from_a_saved_state(run):
    (text := Path("text.txt")).write_text("one line of text like the others\n" * 400)
    assert re.search(r"held-out loss \d\.\d\d bits a byte at step 12", run("train_on_a_text", str(text), "run", "12"))
    sizes = re.findall(r"([\d,]+) (?:tokens|bytes)", run("generate_with_a_saved_state", "run"))
    tokens, state_bytes = (int(size.replace(",", "")) for size in sizes)
    assert tokens > 40_000
    assert state_bytes < 100_000


def test_a_llama_is_given_another_attention(run):
    assert "{'attention': 'llp', 'options': {'segment': 32}}" in run("retrofit_a_llama")


def test_an_own_mechanism_equals_its_definition(run):
    assert "equal to its definition" in run("own_mechanism")
