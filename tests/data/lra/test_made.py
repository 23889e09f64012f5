"""Generated data sets: the same by any number of processes, after a kill, and in any order of blocks."""

import io
import json
import multiprocessing
import sys
import time

import numpy as np
import pytest

from subquad.data.config import LabelledConfig, ListOpsConfig, PathfinderConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.lra import listops, pathfinder
from subquad.data.lra import made as module
from subquad.data.lra.made import main, make_blocks, read_block
from subquad.testing import assert_exact

SHORT = ListOpsConfig(min_length=5, max_length=30, max_depth=4)
PARTS = ("train", "held_out", "test")


def made(folder, length=30, workers=1, progress=None, **changes):
    values = {"dataset": "listops", "examples": 1500, "held_out": 300, "cache": str(folder), "listops": SHORT}
    return labelled_corpus(LabelledConfig(**(values | changes)), length, workers=workers, progress=progress)


def sequences(part) -> list[tuple[bytes, int]]:
    return [(part.sequence(i).tobytes(), int(part.labels[i])) for i in range(len(part))]


@pytest.mark.parametrize(("maker", "options"), [
    (listops, SHORT.to_dict()), (pathfinder, {"size": 32, "difficulty": "easy"})
])  # fmt: skip
def test_a_block_depends_on_its_seed_and_number_alone(maker, options, monkeypatch):
    monkeypatch.setattr(maker, "BLOCK", 5)
    monkeypatch.setattr(pathfinder, "CANVAS_BYTES", 1 << 20)
    blocks = [maker.make_block(options, *place) for place in ((1, 2), (1, 2), (1, 3), (2, 2), (2, 1))]
    first, again, *others = [block.tokens.tolist() for block in blocks]
    assert first == again
    assert (blocks[0].labels == blocks[1].labels).all()
    assert first not in others


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


@pytest.fixture(scope="module")
def corpus(folder):
    return made(folder)


def test_sequences_differ_and_neither_two_processes_nor_more_examples_change_them(corpus, folder, tmp_path):
    def read(**changes):
        found = made(**changes)
        return {part: sequences(getattr(found, part)) for part in PARTS}, found.fingerprint

    parts, fingerprint = read(folder=folder)
    assert [len(rows) for rows in parts.values()] == [1500, 300, 300]
    assert len({tokens for rows in parts.values() for tokens, _ in rows}) == 2100
    assert read(folder=tmp_path, workers=2) == (parts, corpus.fingerprint)
    few, other = read(folder=folder, examples=700)
    assert few == parts | {"train": parts["train"][:700]}
    assert other != fingerprint


def test_an_item_has_tokens_padding_and_a_label(corpus, folder, monkeypatch):
    monkeypatch.setattr(module, "make_blocks", None)  # opened, not made again
    train = made(folder, length=20).train
    lengths = corpus.train.full_lengths[:, 0]
    for index in (int(lengths.argmin()), int(lengths.argmax())):
        item, kept = train[index], min(20, int(lengths[index]))
        assert item["attention_mask"].tolist() == [1] * kept + [0] * (20 - kept)
        assert item["input_ids"].tolist() == [*train.sequence(index), *[0] * (20 - kept)]
        assert_exact(item["input_ids"][:kept], corpus.train[index]["input_ids"][:kept], "tokens")
    assert train.cut == (lengths > 20).sum() > 0
    with pytest.raises(IndexError, match="example 1500 is out of range: there are 1500"):
        train[1500]


def test_a_damaged_store_is_rebuilt(corpus, folder, caplog):
    (corpus.train.shard.path.parent / "train.labels").write_bytes(b"\7")
    assert made(folder).fingerprint == corpus.fingerprint
    assert "is damaged and will be rebuilt" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_work_resumes_from_its_blocks(corpus, tmp_path):
    def make_one_block_and_hang():
        real = listops.make_block
        listops.make_block = lambda *args: real(*args) if args[-1] == 0 else time.sleep(600)
        made(tmp_path)

    child = multiprocessing.get_context("fork").Process(target=make_one_block_and_hang)
    child.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(tmp_path.glob("making-*/0.npz")):
        time.sleep(0.005)
    child.kill()
    child.join()
    (blocks,) = tmp_path.glob("making-*")
    seen = []
    resumed = made(tmp_path, progress=lambda *state: seen.append(state))
    assert seen[0] == ("making listops", 1000, 2100), "begins with what was kept"
    assert resumed.fingerprint == corpus.fingerprint
    assert not blocks.exists()


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: raw[:500], "is not a readable npz file"),
    ({"tokens": [1.5], "lengths": [1], "labels": [0]}, "must be one-dimensional arrays of integers"),
    ({"tokens": [1, 2], "lengths": [2]}, "must be one-dimensional arrays of integers"),
    ({"tokens": [1, 2], "lengths": [1], "labels": [0]}, "1 lengths, 1 labels and 2 tokens do not fit"),
])  # fmt: skip
def test_a_damaged_block_is_made_again(tmp_path, change, message, caplog):
    def make(done=None):
        make_blocks("subquad.data.lra.listops", SHORT.to_dict(), 0, tmp_path, range(2), workers=1, done=done)

    make()
    whole, file, counts = read_block(tmp_path, 1), tmp_path / "1.npz", []
    np.savez(file, **change) if isinstance(change, dict) else file.write_bytes(change(file.read_bytes()))
    make(counts.append)
    assert "1.npz is damaged and will be generated again" in caplog.text
    assert message in caplog.text
    assert counts == [1, 2]
    assert (read_block(tmp_path, 1).tokens == whole.tokens).all()


HOPELESS = ListOpsConfig(min_length=1990, max_length=1990, leaf=0.999).to_dict()


@pytest.mark.parametrize(("maker", "options", "error", "message"), [
    ("listops", HOPELESS, ValueError, r"block 1: none of 1,000,000 trees has 1990 to 1990 tokens: widen listops.min_"),
    ("pathfinder", {"size": 32}, RuntimeError, r"block 1: KeyError\('difficulty'\)"),
    (None, {}, RuntimeError, "ended early: 2 blocks are missing"),
])  # fmt: skip
def test_the_error_of_a_process_is_raised(tmp_path, monkeypatch, capfd, maker, options, error, message):
    """In place of two processes, a script repeats the output of one that ran in this process."""
    task = {"maker": f"subquad.data.lra.{maker}", "options": options, "seed": 0, "folder": str(tmp_path)}
    if maker is not None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(task | {"numbers": [1]})))
        with pytest.raises(SystemExit):
            main()
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{capfd.readouterr().out}END\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(error, match=message):
        make_blocks(task["maker"], options, 0, tmp_path, range(2), workers=2)


def test_what_cannot_be_made_is_refused(tmp_path):
    few = ListOpsConfig(min_length=1, max_length=4, max_depth=2)  # 10 digits and 400 operators of two digits
    with pytest.raises(ValueError, match=r"hardly more than \d+ distinct examples, but 2,100 are asked for"):
        made(tmp_path, listops=few)
    with pytest.raises(OSError, match=r"block 7 in .* is gone: start again"):
        module._block(tmp_path, 7)


def test_pathfinder_is_made_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(pathfinder, "BLOCK", 40)
    easy = PathfinderConfig(difficulty="easy")
    corpus = made(
        tmp_path, 1024, dataset="pathfinder32", examples=30, held_out=5, pathfinder=easy, listops=ListOpsConfig()
    )
    assert [len(getattr(corpus, part)) for part in PARTS] == [30, 5, 5]
    assert (corpus.vocab_size, corpus.classes) == (256, ("apart", "connected"))
    assert {corpus.train[i]["attention_mask"].sum().item() for i in range(30)} == {1024}
    assert np.max(corpus.train.sequence(0)) > 250
