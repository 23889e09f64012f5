"""`subquad data`: what it prints of each data set, the pictures, and its mistakes."""

import json

import numpy as np
import pytest
from PIL import Image

from subquad.cli import main

EASY = ("--pathfinder.difficulty", "easy")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["data", *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-2]


def test_the_toy_is_told(capsys):
    assert main(["data", "toy", "--examples", "50", "--held_out", "20", "--length", "20"]) == 0
    out = capsys.readouterr().out
    for part in ("toy: 3 tokens", "train", "held_out", "test", "marked ones", "an example to learn from:", "-> marked"):
        assert part in out


def test_listops_is_told_in_words(tmp_path, capsys):
    rules = ["--listops.min_length", "5", "--listops.max_length", "20", "--listops.max_depth", "3"]
    sizes = ["--examples", "300", "--held_out", "40", "--length", "10", "--workers", "1"]
    assert main(["data", "listops", *rules, *sizes, "--json", str(tmp_path / "l.json")]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "l.json").read_text())
    assert [part["examples"] for part in record["parts"].values()] == [300, 40, 40]
    train = record["parts"]["train"]
    assert 5 <= train["shortest"] <= train["median"] <= train["longest"] <= 20
    assert 0 < train["cut"] < 300
    assert sum(train["shares"]) == pytest.approx(1)
    assert record["fingerprint"] in out
    assert "cut to 10" in out
    assert any(word in out for word in ("[MIN", "[MAX", "[MED", "[SM"))


def test_pairs_are_shown_both(tmp_path, capsys):
    for name in ("train", "val", "test"):
        (tmp_path / f"pairs_{name}.tsv").write_text("1\tA\tB\n0\tB\tC\n")
    papers = [json.dumps({"id": name, "text": f"the paper {name} " * 50}) for name in "ABC"]
    (tmp_path / "papers.jsonl").write_text("\n".join(papers))
    assert main(["data", "retrieval", "--path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "the paper A" in out
    assert "-- and --\nthe paper B" in out
    assert " ...\n-> cited" in out


def test_pathfinder_is_drawn(tmp_path, capsys):
    picture = tmp_path / "grid.png"
    arguments = [
        "--examples",
        "10",
        "--held_out",
        "5",
        *EASY,
        "--workers",
        "1",
        "--out",
        str(picture),
        "--samples",
        "5",
    ]
    assert main(["data", "pathfinder32", *arguments]) == 0
    out = capsys.readouterr().out
    assert f"{picture} shows 5 sequences" in out
    assert "@@@" in out  # a disc
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert (pixels == 0).sum() > 5000  # the ground of the images
    assert (pixels == 255).sum() > 5000  # the page


def test_images_that_are_cut_are_not_drawn(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "d" / side / name).mkdir(parents=True)
            for i in range(10):
                image = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(image).save(tmp_path / "d" / side / name / f"{i}.png")
    arguments = ["data", "image", "--path", str(tmp_path / "d"), "--out", str(tmp_path / "x.png")]
    assert main(arguments) == 0
    assert f"{tmp_path / 'x.png'} shows 16 sequences" in capsys.readouterr().out
    assert main([*arguments, "--samples", "99"]) == 0
    assert f"{tmp_path / 'x.png'} shows 18 sequences" in capsys.readouterr().out  # all
    assert main([*arguments[:4], "--length", "9"]) == 0
    rows = capsys.readouterr().out.partition("an example to learn from:\n")[2].splitlines()
    assert [len(row) for row in rows[:4]] == [4, 4, 1, len("-> cat")]  # two of four rows and a pixel
    for length in ("10", "9"):  # 9 pixels are a square, of another image
        assert main([*arguments, "--length", length]) == 1
        assert f"images that are cut to {length} pixels are not drawn" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["lisstops"], "'listops'"),
    (["text"], "dataset=text is read, not made: give its path"),
    (["toy", "--length", "0"], "length must be at least 1, got 0"),
    (["toy", "--workers", "0"], "workers must be at least 1, got 0"),
    (["image", "--path", ".", "--samples", "0"], "samples must be at least 1, got 0"),
    (["toy", "--out", "x.png"], "--out draws images, and toy has none; image, pathfinder32"),
    (["pathfinder32", "--out", "x.svg"], "--out must name a .png file, got 'x.svg'"),
    (["pathfinder32", "--out", "nowhere/x.png"], "there is no folder"),
    (["listops", "--listops.max_args", "1"], "listops.max_args must be at least 2, got 1"),
    (["toy", "--lenght", "3"], "unknown option 'lenght'; did you mean 'length'?"),
])  # fmt: skip
def test_wrong_arguments_are_refused(capsys, arguments, message):
    assert message in refused(capsys, *arguments)
