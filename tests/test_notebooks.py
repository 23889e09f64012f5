"""The notebooks of examples/notebooks: their form, and in `make test-long` that they run and draw their pictures."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
PICTURES = {"audit": 0, "retrofit": 1, "train": 2}
MOST_CELLS, MOST_LINES = 14, 39


def test_there_are_no_notebooks_but_these():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_has_short_cells_that_compile_and_no_outputs(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    assert 8 <= len(cells) <= MOST_CELLS
    assert not re.search(r"[\"'](~|/home/|/root/|/tmp/|/work/|[A-Z]:\\)", text), "a path of one machine"
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear the outputs before you commit"
            assert len(cell["source"]) <= MOST_LINES
            compile("".join(cell["source"]), f"{name}, cell {cell['id']}", "exec")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="`make test-long` brings what runs notebooks")
@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_runs_and_draws_its_pictures(name, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND")  # the kernel has its own, which shows pictures
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=170, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
