"""The committed experiments: folders are whole, settings valid, results those of the recipes, pages up to date.

That their smoke scale runs is `make smoke`.
"""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from experiments.harness.claims import read_expected
from experiments.harness.command import experiments, make_parser
from experiments.harness.data import DATA
from experiments.harness.findings import findings
from experiments.harness.plots import known_columns
from experiments.harness.recipe import Recipe, read_recipe
from experiments.harness.result import BEGIN, END, identity_of, read_result, telling, written
from experiments.harness.train import budget_steps, train_config
from experiments.harness.units import Unit, function, units_of
from subquad.training.tasks import check

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "experiments"
NAMES = experiments(HOME)
ASKED = {
    "decode", "elita_wikitext", "latte_figure2", "latte_figure3", "latte_figure4", "latte_stability", "latte_table1",
    "latte_table2", "latte_table3", "length_extrapolation", "linear_mnist", "linear_random", "llp_leak", "llp_table1",
    "llp_table2", "llp_table3", "llp_table4", "llp_table5", "llp_table6", "llp_table9", "lora_mnist",
    "nano_perceiver", "recall",
}  # fmt: skip
TELLING = ("llp_table1", "llp_table2", "latte_table3", "latte_table2", "llp_table9", "linear_mnist")
"""Those that wait for a GPU, or ran on one."""
DATA_ELSEWHERE = {**dict.fromkeys(DATA, "hf:made/up"), "acl": "folder"}  # which is not read from the hub
DATA_ELSEWHERE |= {f"{name}/{part}": f"hf:made/up:{part}" for name, named in DATA.items() for part in named.parts}
LINES = 300


@cache
def recipe_of(name: str) -> Recipe:
    return read_recipe(HOME / name)


def planned(name: str, scale: str) -> list[Unit]:
    return units_of(HOME / name, recipe_of(name), scale, work=Path("work"), data=DATA_ELSEWHERE)


def test_every_claim_that_was_asked_for_has_its_folder() -> None:
    assert set(NAMES) == ASKED


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_whole(name: str) -> None:
    folder, recipe = HOME / name, recipe_of(name)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"python -m experiments {name}" in readme
    assert readme.count(BEGIN) == readme.count(END) == 1
    assert {"smoke", "cpu"} <= set(recipe.scales)
    expected = read_expected(folder)
    assert expected.claims
    ids = [claim.id for claim in expected.claims]
    assert len(ids) == len(set(ids))
    for claim in expected.claims:
        if claim.kind == "function":
            assert function(folder, f"claim_{claim.id}") is not None, claim.id
    for file in folder.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_are_accepted(name: str) -> None:
    text = (HOME / name / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *python -m experiments ([^#\n]+)", text, re.MULTILINE)
    assert commands
    for command in commands:
        chosen = make_parser().parse_args(shlex.split(command))
        assert chosen.name == name
        recipe_of(name).scale(chosen.scale)


TRAINED = [name for name in NAMES if recipe_of(name).kind == "train"]


@pytest.mark.parametrize("name", TRAINED)
def test_the_settings_of_every_scale_are_training_runs(name: str) -> None:
    for scale in recipe_of(name).scales:
        for unit in planned(name, scale):
            if unit.seed == 0:
                check(train_config(unit))


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(name, scale, marks=() if scale in ("smoke", "cpu") else pytest.mark.slow)
        for name in TRAINED
        for scale in recipe_of(name).scales
    ],
)
def test_every_budget_has_its_steps(name: str, scale: str) -> None:
    for unit in planned(name, scale):
        if unit.seed == 0:
            assert set(budget_steps(unit)) == set(unit.budgets)
            assert min(budget_steps(unit).values()) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_that_of_its_recipe(name: str) -> None:
    for scale, values in read_result(HOME / name).items():
        assert values["identity"] == identity_of(planned(name, scale)), f"{name}, {scale}: the recipe has changed"
        assert values["done"] == values["units"], f"{name}, {scale}"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_the_result_says(name: str) -> None:
    folder = HOME / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    told = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert told == written(folder, recipe_of(name), read_expected(folder)), f"python -m experiments {name} --report"


@pytest.mark.parametrize("name", NAMES)
def test_tables_plots_and_claims_speak_of_values_that_there_are(name: str) -> None:
    scales = read_result(HOME / name)
    scale = telling(scales)
    if scale is None:
        pytest.skip("no result yet")
    known = {key for row in scales[scale]["rows"] for key in row}
    recipe = recipe_of(name)
    named = {*recipe.group, *recipe.table, *known_columns(recipe.panels)}
    assert named <= known
    for claim in read_expected(HOME / name).claims:
        if claim.kind in ("lower", "higher", "equal"):
            assert claim.metric in known, claim.id


def test_the_page_of_findings_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert page == findings(HOME, [HOME / name for name in NAMES]), "python -m experiments --findings docs/findings.md"


def test_what_waits_for_a_gpu_is_written_down() -> None:
    todo = (ROOT / "benchmarks" / "GPU_TODO.md").read_text(encoding="utf-8")
    for name in TELLING:
        assert "gpu" in recipe_of(name).scales
        if "gpu" not in read_result(HOME / name):
            assert f"python -m experiments {name} --scale gpu" in todo


def test_the_library_never_imports_an_experiment() -> None:
    for file in (ROOT / "subquad").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] == "experiments" for module in modules), file
