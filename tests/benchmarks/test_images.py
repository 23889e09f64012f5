"""`python -m benchmarks images`: each line is measured with its own number of images."""

import json

import pytest

from benchmarks import images
from benchmarks.command import main
from subquad.hf import SubquadForImages
from subquad.hf.image import SubquadImageConfig
from subquad.models import ImageModelConfig


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Models as `subquad train` leaves them, without their training."""
    folders = {}
    for name in ("linear", "full"):
        config = ImageModelConfig(attention=name, dim=16, num_layers=1, num_heads=2, position="none", height=4, width=4)
        folders[name] = str(tmp_path_factory.mktemp(name))
        SubquadForImages(SubquadImageConfig.from_image(config)).save_pretrained(folders[name])
    return folders


def test_state_cache_and_neither(runs, tmp_path, capsys):
    file = tmp_path / "b.json"
    arguments = ["--images", "2,3", "--batch_size", "2", "--out", str(file), "--markdown"]
    assert main(["images", runs["linear"], runs["full"], *arguments]) == 0
    record = json.loads(file.read_text())
    lines = [(row["attention"], row["cache"], row["images"]) for row in record["rows"]]
    assert lines == [
        ("linear", True, 2), ("linear", True, 3), ("full", True, 2), ("full", True, 3), ("full", False, 2)
    ]  # fmt: skip
    rows = dict(zip(lines, record["rows"], strict=True))
    assert rows["full", False, 2]["state_bytes"] == 0 < rows["linear", True, 2]["state_bytes"]
    for row in record["rows"]:
        assert row["times_the_first"] == row["seconds"] / rows["linear", True, row["images"]]["seconds"]
        assert row["batch_size"] == 2
    assert record["provenance"]["machine"]["cores"]
    out = capsys.readouterr().out
    assert "no cache: each pixel reads the whole prefix" in out
    assert "cache of keys and values" in out
    assert "published" not in out


def test_the_report_s_figures_stand_beside_the_same_numbers_of_images(runs, capsys, monkeypatch):
    monkeypatch.setattr(images, "REPORTED", {"linear": {2: 33.45}, "softmax": {2: 367.91}})
    assert main(["images", runs["full"], "--images", "2", "--no-cache-images", "0", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| softmax, published | not stated | 2 | 367.91 | 0.01 | - | 11.00 |" in out
    assert "no cache" not in out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--images", "2,x"], "--images must be integers separated by commas, such as 100,200, got '2,x'"),
    (["--images", "0"], "--images must be at least 1, got 0"),
    (["--out", "."], "--out must be a file, got '.'"),
])  # fmt: skip
def test_wrong_arguments(runs, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["images", runs["linear"], *arguments])
    assert message in capsys.readouterr().err
