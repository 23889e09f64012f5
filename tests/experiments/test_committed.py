"""The committed experiments: complete folders, valid settings, pages up to date. `make smoke` runs them."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from experiments.harness.claims import read_expected
from experiments.harness.command import experiments, make_parser
from experiments.harness.data import DATA
from experiments.harness.findings import MARK, findings
from experiments.harness.plots import known_columns
from experiments.harness.recipe import read_recipe
from experiments.harness.result import BEGIN, END, STALE, identity_of, read_result, stale, telling, written
from experiments.harness.train import budget_steps, train_config
from experiments.harness.units import function, units_of
from subquad.training.tasks import check

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "experiments"
NAMES = experiments(HOME)
FOR_A_GPU = ("llp_table1", "llp_table2", "latte_table3", "latte_table2", "llp_table9", "linear_mnist")
DATA_ELSEWHERE = {**dict.fromkeys(DATA, "hf:made/up"), "acl": "folder"}  # acl is not read from the hub
DATA_ELSEWHERE |= {f"{name}/{part}": f"hf:made/up:{part}" for name, named in DATA.items() for part in named.parts}
LINES, COLUMNS = 300, 10


@cache
def recipe_of(name):
    return read_recipe(HOME / name)


def page_of(name):
    return (HOME / name / "README.md").read_text(encoding="utf-8")


@cache
def planned(name, scale):
    return units_of(HOME / name, recipe_of(name), scale, work=Path("work"), data=DATA_ELSEWHERE)


def unmarked(page):
    """Return a page without its marks of stale results: a change of the library need not rewrite it."""
    return re.sub(rf"{re.escape(STALE)}.*\n\n|{MARK}", "", page)


each_experiment = pytest.mark.parametrize("name", NAMES)


@each_experiment
def test_a_folder_is_complete_and_the_commands_of_its_page_are_accepted(name):
    folder = HOME / name
    assert page_of(name).count(BEGIN) == page_of(name).count(END) == 1
    assert {"smoke", "cpu"} <= set(recipe_of(name).scales)
    claims = read_expected(folder).claims
    assert claims
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.kind != "function" or function(folder, f"claim_{claim.id}") is not None, claim.id
        assert not claim.on_models or claim.gate is not None, f"{claim.id} rests on models and needs a gate"
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= LINES for file in folder.glob("*.py"))
    commands = re.findall(r"^ *python -m experiments ([^#\n]+)", page_of(name), re.MULTILINE)
    assert commands
    for command in commands:
        chosen = make_parser().parse_args(shlex.split(command))
        assert chosen.name == name
        recipe_of(name).scale(chosen.scale)


@pytest.fixture
def no_values(monkeypatch):
    """Leave out random values, which take half of the time on the meta device."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *_, **__: self)


TRAINED = [name for name in NAMES if recipe_of(name).kind == "train"]


def scales_with(*quick):
    """Return all experiments that train, with each scale; all but the `quick` ones slow."""
    marks = {True: [], False: pytest.mark.slow}
    scales = [(name, scale) for name in TRAINED for scale in recipe_of(name).scales]
    return [pytest.param(name, scale, marks=marks[scale in quick]) for name, scale in scales]


@pytest.mark.parametrize(("name", "scale"), scales_with("cpu"))
@pytest.mark.usefixtures("no_values")
def test_the_settings_are_valid_trainings(name, scale):
    for unit in planned(name, scale):
        if unit.seed == 0:
            check(train_config(unit))


@pytest.mark.parametrize(("name", "scale"), scales_with("smoke"))
@pytest.mark.usefixtures("no_values")
def test_every_budget_has_its_steps(name, scale):
    """The larger scales only differ in sizes, and those with a committed result have run with their budgets."""
    for unit in planned(name, scale):
        assert unit.seed or set(budget_steps(unit)) == set(unit.budgets)


@each_experiment
def test_a_result_is_that_of_its_recipe(name):
    """A stale one awaits its run, as its page says."""
    for scale, values in read_result(HOME / name).items():
        if not stale(values):
            assert values["identity"] == identity_of(planned(name, scale)), f"{name}, {scale}: the recipe has changed"
        assert values["done"] == values["units"], f"{name}, {scale}"


@each_experiment
def test_a_page_says_what_the_result_says(name):
    told = page_of(name).partition(BEGIN)[2].partition(END)[0].strip()
    page = written(HOME / name, recipe_of(name), read_expected(HOME / name))
    assert unmarked(told) == unmarked(page), f"run {name} --report"
    assert max(line.count(" | ") + 1 for line in told.splitlines()) <= COLUMNS


@each_experiment
def test_tables_and_plots_use_columns_of_the_result(name):
    scales, recipe = read_result(HOME / name), recipe_of(name)
    scale = telling(scales)
    assert scale is not None
    missing = {*recipe.group, *recipe.table, *known_columns(recipe.panels)}
    missing -= {key for row in scales[scale]["rows"] for key in row}
    if missing and stale(scales[scale]):
        pytest.skip(f"the result is stale; its next run brings {', '.join(sorted(missing))}")
    assert not missing


def test_the_page_of_findings_is_that_of_the_results():
    assert len(NAMES) == 24
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert unmarked(page) == unmarked(findings(HOME, [HOME / name for name in NAMES])), (
        "python -m experiments --findings docs/findings.md"
    )


def test_experiments_that_wait_for_a_gpu_are_written_down():
    todo = (ROOT / "benchmarks" / "GPU_TODO.md").read_text(encoding="utf-8")
    for name in FOR_A_GPU:
        assert "gpu" in recipe_of(name).scales
        if "gpu" not in read_result(HOME / name):
            assert f"python -m experiments {name} --scale gpu" in todo
