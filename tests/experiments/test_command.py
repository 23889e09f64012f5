"""`python -m experiments`: runs, keeps, compares, rewrites, and refuses what makes no sense."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.harness.command import main
from experiments.harness.findings import findings
from experiments.harness.plots import draw
from experiments.harness.recipe import read_recipe
from experiments.harness.result import read_result


def run(*arguments: str) -> int:
    return main([*arguments, *(() if "--folder" in arguments else ("--folder", "experiments"))])


def rewrite(file: Path, **values: object) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **values}))


def test_an_experiment_is_run_compared_and_written_down(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiments / "measured"
    assert run("measured", "--processes", "1") == 0
    shown = capsys.readouterr()
    assert "4 of 4: two, seed 1" in shown.err
    assert "two is more than one: holds\n    theirs: 2 > 1\n    ours: 8.5 against 4.5" in shown.out
    result = read_result(folder)["cpu"]
    assert (result["units"], result["done"], len(result["rows"])) == (4, 4, 8)
    assert result["rows"][1] == {"arm": "one", "seed": 0, "tokens": 2, "value": 4, "note": "seen"}
    assert {"machines", "versions", "commits", "dates", "seconds"} <= result.keys()
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# measured\n\nBefore.")
    assert readme.endswith("After.\n")
    assert "| two is more than one | 2 > 1 | 8.5 against 4.5 (+4 ± 0.7071) | holds |" in readme
    assert "| as good as X | X 3 | other tokens | not comparable |" in readme
    assert "| one | 2 | 4.5 ± 0.71 | seen | 2 |" in readme
    assert "![the result](plot.png)" in readme
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = findings(experiments, [folder])
    assert "3 claims: holds 2, not comparable 1." in page
    assert "| [measured](../experiments/measured) | two is more than one |" in page


def test_the_page_has_what_it_is_told_to_have(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiments / "measured"
    assert run("measured", "--processes", "1") == 0
    capsys.readouterr()
    expected = json.loads((folder / "expected.json").read_text())
    expected["claims"][0]["on_page"] = False
    (folder / "expected.json").write_text(json.dumps({**expected, "caption": "values by tokens"}))
    (experiments / "choose.md").write_text("## What to take\n\nSee [measured](measured).\n")
    (experiments / "wrong.md").write_text("## What is wrong\n\nNothing.\n")
    page = findings(experiments, [folder])
    assert "two is more than one" not in page
    assert "The folders have 1 more claims: holds 1." in page
    assert "![values by tokens](../experiments/measured/plot.png)" in page
    assert "See [measured](../experiments/measured)." in page
    assert page.index("What to take") < page.index("## A paper") < page.index("What is wrong")


def test_there_is_no_plot_of_nothing(experiments: Path) -> None:
    folder = experiments / "measured"
    with pytest.raises(ValueError, match="measured has no rows to draw"):
        draw(folder, read_recipe(folder), [], folder / "plot.png")


def test_smoke_leaves_the_folder_as_it_is(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.read_bytes() for file in (experiments / "measured").iterdir() if file.is_file()}
    assert run("--all", "--scale", "smoke", "--processes", "1", "--work", "w") == 0
    shown = capsys.readouterr().out
    assert "its figures say nothing about the claims" in shown
    assert "2 experiments" in shown
    after = {file.name: file.read_bytes() for file in (experiments / "measured").iterdir() if file.is_file()}
    assert before == after
    assert Path("w/measured/smoke/result.json").is_file()
    assert Path("w/trained/smoke/plot.png").is_file()
    assert run("measured", "--scale", "smoke", "--processes", "1", "--work", "w") == 0
    assert "2 of 2" in capsys.readouterr().err  # what runs is the code of today


def test_what_is_done_is_not_done_again_unless_it_changed(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiments / "measured" / "recipe.yaml"
    assert run("measured", "--processes", "1") == 0
    capsys.readouterr()
    assert run("measured", "--processes", "1") == 0
    assert capsys.readouterr().err == ""
    rewrite(file, settings={"factor": 5})
    assert run("measured", "--processes", "1") == 0
    assert "4 of 4" in capsys.readouterr().err
    assert read_result(file.parent)["cpu"]["rows"][0]["value"] == 5


def test_a_unit_that_fails_is_said_and_the_others_are_kept(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = experiments / "measured"
    rewrite(folder / "recipe.yaml", arms={"one": {"settings": {"value": 1}}, "bad": {"settings": {"fails": True}}})
    claims = json.loads((folder / "expected.json").read_text())
    (folder / "expected.json").write_text(json.dumps({**claims, "claims": claims["claims"][1:]}))
    assert run("measured", "--processes", "2") == 1
    assert "failed: measured, bad, seed 0: ValueError: told to fail; see " in capsys.readouterr().err
    assert "(2 of 4 units)" in (folder / "README.md").read_text()


def test_results_are_compared_again_without_running(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiments / "measured"
    assert run("measured", "--processes", "1") == 0
    rows = (folder / "result.json").read_bytes()
    claims = json.loads((folder / "expected.json").read_text())
    claims["claims"][0]["kind"] = "lower"
    (folder / "expected.json").write_text(json.dumps(claims))
    assert run("measured", "--report") == 0
    assert "| does not hold |" in (folder / "README.md").read_text()
    assert (folder / "result.json").read_bytes() == rows
    assert run("--findings", "findings.md") == 0
    assert "**does not hold**" in Path("findings.md").read_text()
    assert "**not run**" in Path("findings.md").read_text()  # of the other experiment
    capsys.readouterr()


def test_without_a_name_the_experiments_are_listed(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert "measured" in shown
    assert "smoke (0 min), cpu (0 min)" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure"], "unknown experiment 'measure'; did you mean 'measured'? valid: measured, trained"),
        (["measured", "--scale", "big"], "unknown scale 'big'; valid: cpu, gpu, paper, smoke"),
        (["measured", "--scale", "gpu"], "this experiment has no scale 'gpu'; did you mean 'cpu'? valid: cpu, smoke"),
        (["measured", "--all"], "NAME and --all exclude each other; give one"),
        (["--all", "--findings", "x.md"], "--all and --findings exclude each other"),
        (["measured", "--processes", "0"], "--processes must be at least 1, got 0"),
        (["measured", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["measured", "--data", "books"], "--data takes NAME=PATH, got 'books'"),
        (["--findings", "none/x.md"], "there is no folder"),
        (["measured", "--folder", "none"], "there is no folder none"),
    ],
)
def test_wrong_arguments_are_answered(
    experiments: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_training_that_makes_no_sense_is_refused_before_any_work(
    experiments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiments / "trained" / "recipe.yaml"
    rewrite(file, arms={"full": {"settings": {"model": {"attention": "fulll"}}}}, scales={"cpu": {}})
    with pytest.raises(SystemExit):
        run("trained")
    assert "trained: full, seed 0: unknown attention 'fulll'; did you mean 'full'" in capsys.readouterr().err
    rewrite(file, arms={"full": {"settings": {"model": {"dims": 4}}}})
    with pytest.raises(SystemExit):
        run("trained")
    assert "trained: full, seed 0: DecoderConfig has no key 'model.dims'" in capsys.readouterr().err


def test_damaged_folders_are_named(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = experiments / "measured"
    readme = folder / "README.md"
    before = readme.read_text()
    readme.write_text("no marks")
    assert run("measured", "--processes", "1") == 1
    assert "README.md needs one line '<!-- begin: written by python -m experiments -->'" in capsys.readouterr().err
    readme.write_text(before)
    (folder / "result.json").write_text("{}")
    assert run("measured", "--report") == 1
    assert "result.json is damaged: it has no" in capsys.readouterr().err
    (folder / "experiment.py").unlink()
    (folder / "result.json").unlink()
    rewrite(folder / "recipe.yaml", settings={"factor": 7})
    assert run("measured", "--processes", "1") == 1
    assert "needs a function run(unit) in experiment.py" in capsys.readouterr().err
