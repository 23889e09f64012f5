"""`python -m experiments`: it runs, keeps, compares and reports, and refuses invalid arguments."""

import json
from pathlib import Path

import pytest

from experiments.harness.command import main
from experiments.harness.findings import findings
from experiments.harness.result import STALE, read_result
from experiments.harness.source import library_hash
from tests.experiments.helpers import TINY, change


def run(*arguments):
    return main([*arguments, *(() if "--folder" in arguments else ("--folder", "experiments"))])


def measure(*more):
    return run("measured", "--processes", "1", *more)


def edit_first_claim(file, **claim):
    expected = json.loads(file.read_text())
    expected["claims"][0].update(claim)
    file.write_text(json.dumps({**expected, "caption": "values by tokens"}))


def test_a_result_is_kept_compared_and_reported_again_without_running(experiments, capsys):
    folder = experiments / "measured"
    assert measure() == 0
    shown = capsys.readouterr()
    assert "4 of 4: two, seed 1" in shown.err
    assert "two is more than one: indication\n    theirs: 2 > 1\n    ours: 8.5 against 4.5" in shown.out
    result = read_result(folder)["cpu"]
    assert (result["units"], result["done"], len(result["rows"])) == (4, 4, 8)
    assert result["rows"][1] == {"arm": "one", "seed": 0, "tokens": 2, "value": 4, "note": "seen"}
    assert {"machines", "versions", "commits", "dates", "core_seconds", "libraries"} <= result.keys()
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# measured\n\nBefore.")
    assert readme.endswith("After.\n")
    assert (
        "| two is more than one | 2 > 1 | 8.5 against 4.5 (+4, +0.958 to +7.04); for the claim | indication |" in readme
    )
    assert "| one | 2 | 4.5 ± 0.71 | seen | 2 |" in readme
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "2 claims of papers: indication 1, not comparable 1; 1 claims of our own: holds 1. All took 0.0 core-hours."
        in (findings(experiments, [folder]))
    )
    assert "Weight: **medium** (1 of 2 claims decided; 2 repeats of the timings)." in readme
    assert "| there are rows (ours) | many | 8 rows | holds |" in readme
    assert "/ 60" not in readme
    assert " core-minutes in 1 process;" in readme

    rows = (folder / "result.json").read_bytes()
    edit_first_claim(folder / "expected.json", kind="lower")
    assert run("measured", "--report") == 0
    readme = (folder / "README.md").read_text()
    assert "; against the claim | indication |" in readme
    assert "![values by tokens](plot.png)" in readme
    assert (folder / "result.json").read_bytes() == rows
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    assert "\nusage: python -m experiments [NAME] [options]\n" in capsys.readouterr().out
    assert run() == 0
    assert "smoke (0 min), cpu (0 min)" in capsys.readouterr().out  # the list of experiments
    assert run("--findings", "findings.md") == 0
    page = Path("findings.md").read_text()
    shown = "- **indication:** two is more than one: 8.5 against 4.5 (+4, +0.958 to +7.04); against the claim\n"
    assert f"### A paper\n\n- [measured](../experiments/measured) (medium)\n  {shown}" in page
    assert "- **not run:**" in page  # of the other experiment

    edit_first_claim(folder / "expected.json", on_page=False)
    (experiments / "choose.md").write_text(
        "## What to choose\n\nSee [measured](measured), [costs](../docs/costs.md).\n"
    )
    (experiments / "wrong.md").write_text("## What is wrong\n\nNothing.\n")
    (experiments / "review.md").write_text("## What a review found\n\nMuch.\n\n<!-- more -->\n\nAll of it.\n")
    page = findings(experiments, [folder])
    assert "two is more than one" not in page
    assert "2 claims of papers: indication 1," in page  # counted all the same
    assert "See [measured](../experiments/measured), [costs](costs.md)." in page
    review = "## What a review found\n\nMuch.\n\n[The details](../experiments/review.md)."
    assert page.startswith(f"# Findings\n\n{review}\n\n## What to choose\n\n")
    assert page.index("What to choose") < page.index("### A paper") < page.index("What is wrong")


def test_advice_links_to_the_figures_of_its_claims(experiments):
    folder, file = experiments / "measured", experiments / "choices.yaml"
    assert measure() == 0
    (experiments / "choose.md").write_text("## Advice\n\n<!-- choices -->\n")
    advice = {"need": "more", "choose": "two", "unless": "one"}
    file.write_text(json.dumps({"choices": [{**advice, "claims": ["measured/more", "measured/more"]}, advice]}))
    page = findings(experiments, [folder])
    assert "| two | more | [measured](../experiments/measured) | one |" in page
    assert "| two | more | untested | one |" in page
    none = [{**advice, "withdrawn": "counts win"}, {**advice, "claims": ["measured/more"], "withdrawn": "counts win"}]
    file.write_text(json.dumps({"choices": none}))
    page = findings(experiments, [folder])
    assert "- **more**: counts win. Needed: one." in page
    assert "- **more**: counts win; [measured](../experiments/measured). Needed: one." in page
    file.write_text(json.dumps({"choices": [{**advice, "claims": ["measured/mor"]}]}))
    with pytest.raises(ValueError, match=r"choices\.yaml, 'more': unknown claim 'measured/mor'; "):
        findings(experiments, [folder])


def test_results_of_an_earlier_library_are_marked_and_listed(experiments, capsys):
    folder = experiments / "measured"
    assert measure() == 0
    assert STALE not in (folder / "README.md").read_text()
    assert run("--stale") == 0
    assert "measured" not in capsys.readouterr().out.partition("name")[2]
    for libraries, told in (({"an older one": 1, library_hash(): 3}, "1 of 4"), (None, "4 of 4")):
        result = json.loads((folder / "result.json").read_text())
        result["scales"]["cpu"].pop("libraries")
        result["scales"]["cpu"] |= {"libraries": libraries} if libraries else {}
        (folder / "result.json").write_text(json.dumps(result))
        assert run("measured", "--report") == 0
        assert f"{STALE}: {told} units." in (folder / "README.md").read_text()
        assert run("--stale") == 0
        assert "cpu (stale)" in capsys.readouterr().out
        assert "(medium; stale)" in findings(experiments, [folder])


def test_smoke_leaves_the_folder_as_it_is_and_starts_afresh(experiments, capsys):
    before = {file.name: file.read_bytes() for file in (experiments / "measured").iterdir() if file.is_file()}
    change(experiments / "trained", scales={"smoke": {"held": {"tokens": 64, "stride": 4}}})
    assert run("--all", "--scale", "smoke", "--processes", "1", "--work", "w") == 0
    shown = capsys.readouterr().out
    assert "its figures say nothing about the claims" in shown
    assert "2 experiments" in shown
    assert before == {name: (experiments / "measured" / name).read_bytes() for name in before}
    assert not (experiments / "measured" / "result.json").exists()
    assert Path("w/measured/smoke/result.json").is_file()
    assert Path("w/trained/smoke/plot.png").is_file()
    assert measure("--scale", "smoke", "--work", "w") == 0
    assert "2 of 2" in capsys.readouterr().err


def test_an_experiment_that_reads_a_result_runs_after_it_and_every_time(experiments, capsys):
    change(experiments / "measured", reads="trained", scales={"cpu": {}})
    change(experiments / "trained", scales={"cpu": {"held": {"tokens": 64, "stride": 4}}}, arms={"full": {}})
    for told in ("trained, 1 of 1", "measured, 1 of 2"):
        assert run("--all", "--processes", "1", "--work", "w") == 0
        said = [text for text in capsys.readouterr().err.splitlines() if ": data " not in text]
        assert said[0].startswith(told)


def test_done_units_run_again_only_if_they_changed_and_a_failed_one_is_reported(experiments, capsys):
    folder = experiments / "measured"
    assert measure() == 0
    capsys.readouterr()
    change(
        folder, arms={"one": {"settings": {"value": 1}, "labels": {"kind": "new"}}, "two": {"settings": {"value": 2}}}
    )
    assert measure() == 0
    assert capsys.readouterr().err == ""
    assert read_result(folder)["cpu"]["rows"][0]["kind"] == "new"  # labels are no part of a unit's identity
    change(folder, settings={"factor": 5})
    assert measure() == 0
    assert "4 of 4" in capsys.readouterr().err
    assert read_result(folder)["cpu"]["rows"][0]["value"] == 5

    change(folder, arms={"one": {"settings": {"value": 1}}, "bad": {"settings": {"fails": True}}})
    edit_first_claim(folder / "expected.json", kind="waiting", why="later")
    (folder / "result.json").unlink()
    assert measure() == 1
    assert "failed: measured, bad, seed 0: ValueError: told to fail; see " in capsys.readouterr().err
    assert "(2 of 4 units)" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("measure", "unknown experiment 'measure'; did you mean 'measured'? valid: measured, trained"),
        ("measured --scale big", "unknown scale 'big'; valid: cpu, gpu, paper, smoke"),
        ("measured --scale gpu", "this experiment has no scale 'gpu'; did you mean 'cpu'? valid: cpu, smoke"),
        ("measured --all", "NAME and --all exclude each other; give one"),
        ("--all --stale", "--all and --stale exclude each other"),
        ("--all --findings x.md", "--all and --findings exclude each other"),
        ("measured --processes 0", "--processes must be at least 1, got 0"),
        ("measured --threads 0", "--threads must be at least 1, got 0"),
        ("measured --data books", "--data takes NAME=PATH, got 'books'"),
        ("--findings none/x.md", "there is no folder"),
        ("measured --folder none", "there is no folder none"),
    ],
)
def test_invalid_arguments_are_refused(experiments, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


HELD_OUT = {"path": "@tinyshakespeare", "held_out_path": "@tinyshakespeare"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"attention": "fulll"}}, "unknown attention 'fulll'; did you mean 'full'"),
        ({"model": {"dims": 4}}, "DecoderConfig has no key 'model.dims'"),
        ({"data": HELD_OUT}, "data.held_out_path equals data.path"),
    ],
)
def test_an_invalid_training_is_refused_before_any_work(experiments, capsys, changes, message):
    Path("text.txt").write_text("some words\n" * 50)
    change(experiments / "trained", settings=TINY, arms={"full": {"settings": changes}}, scales={"cpu": {}})
    with pytest.raises(SystemExit):
        run("trained", "--data", "tinyshakespeare=text.txt")
    assert f"trained: full, seed 0: {message}" in capsys.readouterr().err


def test_damaged_folders_are_named(experiments, capsys):
    folder = experiments / "measured"
    readme = (folder / "README.md").read_text()
    (folder / "README.md").write_text("no marks")
    assert measure() == 1
    assert "README.md needs one line '<!-- begin: written by python -m experiments -->'" in capsys.readouterr().err
    (folder / "README.md").write_text(readme)
    (folder / "result.json").write_text("{}")
    assert run("measured", "--report") == 1
    assert "result.json is damaged: it has no" in capsys.readouterr().err
    (folder / "experiment.py").unlink()
    (folder / "result.json").unlink()
    change(folder, settings={"factor": 7})
    assert measure() == 1
    assert "needs a function run(unit) in experiment.py" in capsys.readouterr().err
