"""Pictures of reports: their lines, titles and axes, without points that were not measured."""

import dataclasses

import pytest

from benchmarks.plots import draw, save
from benchmarks.report import Report


def drawn(axis) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_a_panel_per_pass_and_a_line_per_label(made_up):
    figures = draw(made_up)
    assert set(figures) == {"time", "memory", "latents"}
    forward, both = figures["time"].axes
    assert drawn(forward) == {"sdpa": ([128, 256], [128.0, 256.0]), "latte": ([128, 256], [102.4, 204.8])}
    assert forward.get_title() == "Forward pass: time against length"
    assert (both.get_xlabel(), both.get_ylabel()) == ("sequence length (tokens)", "time (ms)")
    assert (both.get_xscale(), both.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in forward.get_legend().get_texts()] == ["sdpa", "latte"]
    forward, both = figures["latents"].axes
    assert drawn(forward)["latte, 256 tokens"][0] == [8, 16]
    assert drawn(both)["latte, 256 tokens"][0] == [8], "16 latents ran out of memory"


def test_a_panel_has_at_most_eight_lines(made_up):
    """Beyond, a second figure goes on, with the base in it too."""
    rows = [{**row, "label": f"{row['label']} {n}"} for row in made_up.rows if row["name"] == "latte" for n in range(8)]
    base = [row for row in made_up.rows if row["name"] == "sdpa"]
    settings = {**made_up.settings, "latents": [8]}
    for more, lines in ((rows[:7], [8]), (rows, [8, 2])):
        figures = draw(dataclasses.replace(made_up, rows=base + more, settings=settings))
        names = ["time", "time_2"][: len(lines)]
        assert [name for name in figures if name.startswith("time")] == names
        assert [len(drawn(figures[name].axes[0])) for name in names] == lines
        assert all("sdpa" in drawn(figures[name].axes[0]) for name in names)


def test_a_report_without_a_figure_gives_no_picture(made_up):
    failed = [{**row, "status": "failed"} for row in made_up.rows]
    assert draw(dataclasses.replace(made_up, rows=failed)) == {}
    assert draw(dataclasses.replace(made_up, rows=made_up.rows[:2]))["time"].axes, "a pass without rows"


@pytest.mark.parametrize(("what", "which"), [("model", "step"), ("decode", "token")])
def test_models_and_decoding_are_drawn_with_the_same_bytes_each_time(what, which, made_up, tmp_path):
    sizes = {"layers": 2, "dim": 16, "device": "cuda:0", "batch_tokens": 64}
    change = {"pass": which, "state_bytes": 2**20, "peak_bytes": None, "latents": None}
    rows = [{**row, **change} for row in made_up.rows if row["name"] == "sdpa"]
    report = Report(what, {**made_up.settings, **sizes}, rows, made_up.provenance)
    figures = draw(report)
    assert list(drawn(figures["time"].axes[0])) == ["sdpa"]
    if what == "decode":
        assert drawn(figures["state"].axes[0])["sdpa"][1][0] == 1.0
    files, again = ([report.save(folder), *save(report, folder)] for folder in (tmp_path / "a", tmp_path / "b"))
    assert [file.name for file in files] == [f"gpu_{what}.json", *(f"gpu_{what}_{name}.png" for name in figures)]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]
