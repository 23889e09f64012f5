"""`subquad data`: statistics and pictures of data sets, token shards, mistakes."""

import json

import numpy as np
import pytest
from PIL import Image

from subquad.cli import main
from subquad.data import TokenSet
from tests.data.sets import flip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def test_the_toy_is_described(printed):
    out = printed("data", "toy", "--examples", "50", "--held_out", "20", "--length", "20")
    for part in ("toy: 3 tokens", "train", "held_out", "test", "marked ones", "a training example:", "-> marked"):
        assert part in out


def test_listops_is_described_in_words(tmp_path, printed):
    rules = ["--listops.min_length", "5", "--listops.max_length", "20", "--listops.max_depth", "3"]
    sizes = ["--examples", "100", "--held_out", "20", "--length", "10", "--workers", "1"]
    out = printed("data", "listops", *rules, *sizes, "--json", tmp_path / "l.json")
    record = json.loads((tmp_path / "l.json").read_text())
    assert [part["examples"] for part in record["parts"].values()] == [100, 20, 20]
    train = record["parts"]["train"]
    assert 5 <= train["shortest"] <= train["median"] <= train["longest"] <= 20
    assert 0 < train["cut"] < 100
    assert sum(train["shares"]) == pytest.approx(1)
    assert record["fingerprint"] in out
    assert "cut to 10" in out
    assert any(word in out for word in ("[MIN", "[MAX", "[MED", "[SM"))


def test_both_texts_of_a_pair_are_shown(tmp_path, printed):
    for name in ("train", "val", "test"):
        (tmp_path / f"pairs_{name}.tsv").write_text("1\tA\tB\n0\tB\tC\n")
    papers = [json.dumps({"id": name, "text": f"the paper {name} " * 50}) for name in "ABC"]
    (tmp_path / "papers.jsonl").write_text("\n".join(papers))
    out = printed("data", "retrieval", "--path", tmp_path)
    assert "the paper A" in out
    assert "-- and --\nthe paper B" in out
    assert " ...\n-> cited" in out


def test_pathfinder_is_drawn(tmp_path, printed):
    picture, easy = tmp_path / "grid.png", ["--pathfinder.difficulty", "easy", "--workers", "1"]
    sizes = ["--examples", "3", "--held_out", "1", "--samples", "3"]
    out = printed("data", "pathfinder32", *sizes, *easy, "--out", picture)
    assert f"{picture} shows 3 training examples" in out
    assert "@@@" in out  # a disc
    pixels = np.asarray(Image.open(picture).convert("L"))
    assert (pixels == 0).sum() > 5000  # the ground of the images
    assert (pixels == 255).sum() > 5000  # the page


def test_truncated_images_are_not_drawn(tmp_path, capsys, printed):
    rng = np.random.default_rng(0)
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "d" / side / name).mkdir(parents=True)
            for i in range(5):
                image = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                Image.fromarray(image).save(tmp_path / "d" / side / name / f"{i}.png")
    arguments = ["data", "image", "--path", str(tmp_path / "d"), "--out", str(tmp_path / "x.png")]
    assert f"{tmp_path / 'x.png'} shows 9 training examples" in printed(*arguments, "--samples", "99")  # all
    rows = printed(*arguments[:4], "--length", "9").partition("a training example:\n")[2].splitlines()
    assert [len(row) for row in rows[:4]] == [4, 4, 1, len("-> cat")]  # two of four rows and a pixel
    for length in ("10", "9"):  # 9 pixels are a square, of another image
        assert main([*arguments, "--length", length]) == 1
        assert f"images truncated to {length} pixels can't be drawn" in capsys.readouterr().err


def test_token_shards_are_made_and_checked(tmp_path, capsys, printed):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for n in range(9):
        (texts / f"{n}.txt").write_text(f"document {n} " * (n + 1))
    arguments = ["data", "tokens", str(texts), str(texts / "0.txt"), "--out", str(out), "--shard_tokens", "100"]
    said, tokens = printed(*arguments, "--json", tmp_path / "j.json"), TokenSet(out)
    assert f"{len(tokens):,} tokens of 10 documents in 4 shards, 256 in the vocabulary" in said
    assert "00003.tokens" in said
    record = json.loads((tmp_path / "j.json").read_text())
    assert (record["tokens"], record["shards"], record["documents"]) == (len(tokens), 4, 10)
    assert record["fingerprint"] == tokens.fingerprint
    assert f"4 of 4 shards of {out} are intact" in printed("data", "check", out)
    flip(out / "00002.tokens")
    (out / "00003.tokens").unlink()
    assert main(["data", "check", str(out)]) == 1
    said = capsys.readouterr().out
    assert all(part in said for part in ("shard 00002.tokens of", "shard 00003.tokens of", "2 of 4 shards"))
    assert main(arguments) == 1
    assert "exists already; choose another folder" in capsys.readouterr().err


TOKENS = ["tokens", "x.txt", "--out", "out"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["lisstops"], "'listops'"),
    (["pathfinder32", "--out", "nowhere/x.png"], "there is no folder"),
    (["toy", "--length", "0"], "length must be at least 1, got 0"),
    (["image", "--path", ".", "--samples", "0"], "samples must be at least 1, got 0"),
    (["toy", "--out", "x.png"], "--out draws images, and toy has none; image, pathfinder32"),
    (["pathfinder32", "--out", "x.svg"], "--out must name a .png file, got 'x.svg'"),
    ([*TOKENS, "--tokenizer", "bpe"], "tokenizer 'bpe' has to be trained on the text first"),
    (["check", "."], "holds no index.json"),
])  # fmt: skip
def test_wrong_arguments_are_refused(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    assert message in refused("data", *arguments)
    assert not (tmp_path / "out").exists()
