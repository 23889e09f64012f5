"""The pictures: which lines they have, and that what was not measured is left out."""

import dataclasses

import pytest

from benchmarks.plots import draw, save
from benchmarks.report import Report


def drawn(axis) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}


def test_time_against_length_has_a_panel_a_pass_and_a_line_a_label(made_up):
    figures = draw(made_up)
    assert set(figures) == {"time", "memory", "latents"}
    forward, both = figures["time"].axes
    assert drawn(forward) == {"sdpa": ([128, 256], [128.0, 256.0]), "latte": ([128, 256], [102.4, 204.8])}
    assert forward.get_ylabel() == "forward: milliseconds"
    assert both.get_ylabel() == "forward + backward: milliseconds"
    assert (both.get_xscale(), both.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in forward.get_legend().get_texts()] == ["sdpa", "latte"]


def test_time_against_latents_leaves_out_what_ran_out_of_memory(made_up):
    forward, both = draw(made_up)["latents"].axes
    assert drawn(forward)["latte, 256 tokens"][0] == [8, 16]
    assert drawn(both)["latte, 256 tokens"][0] == [8]
    assert draw(dataclasses.replace(made_up, rows=made_up.rows[:2]))["time"].axes


def test_a_report_without_a_figure_gives_no_picture(made_up):
    failed = [{**row, "status": "failed"} for row in made_up.rows]
    assert draw(dataclasses.replace(made_up, rows=failed)) == {}


def test_pictures_are_written_beside_the_numbers_and_are_the_same_each_time(made_up, tmp_path):
    files = [*made_up.save(tmp_path / "a"), *save(made_up, tmp_path / "a")]
    assert [file.name for file in files] == [
        "cpu_ops.json",
        "cpu_ops.csv",
        "cpu_ops_time.png",
        "cpu_ops_memory.png",
        "cpu_ops_latents.png",
    ]
    again = [*made_up.save(tmp_path / "b"), *save(made_up, tmp_path / "b")]
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


@pytest.mark.parametrize("what", ["model", "decode"])
def test_models_and_decoding_are_drawn(what, made_up):
    sizes = {"layers": 2, "dim": 16, "device": "cuda:0", "batch_tokens": 64}
    which = {"model": "step", "decode": "token"}[what]
    rows = [
        {**row, "pass": which, "state_bytes": 2**20, "latents": None} for row in made_up.rows if row["name"] == "sdpa"
    ]
    report = Report(what, {**made_up.settings, **sizes}, rows, made_up.provenance)
    assert report.stem == f"gpu_{what}"
    figures = draw(report)
    assert list(drawn(figures["time"].axes[0])) == ["sdpa"]
    if what == "decode":
        assert drawn(figures["time"].axes[1])["sdpa"][1][0] == 1.0
