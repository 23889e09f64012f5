"""Data sets that are made: the same by any number of processes, after a kill, and in any order of blocks."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from subquad.data.config import LabelledConfig, ListOpsConfig, PathfinderConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.lra import made as made_module
from subquad.data.lra.made import make_blocks, read_block
from subquad.testing import assert_exact

SHORT = ListOpsConfig(min_length=5, max_length=30, max_depth=4)


def config(folder, **changes) -> LabelledConfig:
    values = {"dataset": "listops", "examples": 1500, "held_out": 300, "cache": str(folder), "listops": SHORT}
    return LabelledConfig(**(values | changes))


def all_sequences(part) -> list[tuple[bytes, int]]:
    return [(part.sequence(i).tobytes(), int(part.labels[i])) for i in range(len(part))]


def test_two_processes_make_what_one_makes(tmp_path):
    one = labelled_corpus(config(tmp_path / "1"), 30, workers=1)
    two = labelled_corpus(config(tmp_path / "2"), 30, workers=2)
    assert one.fingerprint == two.fingerprint
    for name in ("train", "held_out", "test"):
        assert all_sequences(getattr(one, name)) == all_sequences(getattr(two, name))
    assert [len(one.train), len(one.held_out), len(one.test)] == [1500, 300, 300]


def test_all_sequences_differ_and_no_part_has_one_of_another(tmp_path):
    corpus = labelled_corpus(config(tmp_path), 30, workers=1)
    found = [tokens for part in (corpus.train, corpus.held_out, corpus.test) for tokens, _ in all_sequences(part)]
    assert len(found) == len(set(found)) == 2100


def test_more_examples_leave_the_other_parts_as_they_are(tmp_path):
    few, more = (labelled_corpus(config(tmp_path, examples=count), 30, workers=1) for count in (700, 1500))
    assert all_sequences(few.test) == all_sequences(more.test)
    assert all_sequences(few.held_out) == all_sequences(more.held_out)
    assert all_sequences(few.train) == all_sequences(more.train)[:700]
    assert few.fingerprint != more.fingerprint


def test_an_item_has_tokens_padding_and_a_label(tmp_path):
    corpus = labelled_corpus(config(tmp_path), 20, workers=1)
    lengths = corpus.train.full_lengths[:, 0]
    short, long = int(lengths.argmin()), int(lengths.argmax())
    for index in (short, long):
        item = corpus.train[index]
        kept = min(20, int(lengths[index]))
        assert item["attention_mask"].tolist() == [1] * kept + [0] * (20 - kept)
        assert item["input_ids"][kept:].tolist() == [0] * (20 - kept)
        assert item["input_ids"][:kept].tolist() == list(corpus.train.sequence(index))
    assert corpus.train.cut == (lengths > 20).sum() > 0
    with pytest.raises(IndexError, match="example 1500 is out of range: there are 1500"):
        corpus.train[1500]


def test_what_was_made_is_opened_and_not_made_again(tmp_path, monkeypatch):
    first = labelled_corpus(config(tmp_path), 30, workers=1)
    monkeypatch.setattr(made_module, "make_blocks", None)
    again = labelled_corpus(config(tmp_path), 30)
    assert_exact(first.train[3]["input_ids"], again.train[3]["input_ids"], "tokens")


def test_damage_is_noticed_and_made_good(tmp_path, caplog):
    first = labelled_corpus(config(tmp_path), 30, workers=1)
    (folder,) = tmp_path.glob("labelled-*")
    for name in ("train.labels", "manifest.json"):
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)
        assert labelled_corpus(config(tmp_path), 30, workers=1).fingerprint == first.fingerprint
        assert "cannot be used and is made again" in caplog.text
        caplog.clear()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    assert labelled_corpus(config(tmp_path), 30, workers=1).fingerprint == first.fingerprint
    assert "has version 99 of labelled data, this release reads 1" in caplog.text


def test_work_that_was_killed_goes_on(tmp_path):
    usual = {"dataset": "listops", "examples": 3000, "held_out": 500, "cache": str(tmp_path / "killed")}
    code = (
        "from subquad.data.config import LabelledConfig; from subquad.data.lra.made import made\n"
        f"made(LabelledConfig(**{usual!r}), workers=1)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "killed").glob("making-*/0.npz")):
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (blocks,) = (tmp_path / "killed").glob("making-*")
    before = {path.name: path.stat().st_mtime_ns for path in blocks.glob("?.npz")}
    assert 1 <= len(before) < 4
    made_again = []
    resumed = labelled_corpus(LabelledConfig(**usual), 1999, workers=1, progress=lambda *a: made_again.append(a))
    assert made_again[0][1] == 1000 * len(before)  # begins with what was kept
    assert not blocks.exists()
    whole = labelled_corpus(LabelledConfig(**(usual | {"cache": str(tmp_path / "whole")})), 1999, workers=1)
    assert resumed.fingerprint == whole.fingerprint


def test_a_damaged_block_is_made_again(tmp_path, caplog):
    options = SHORT.to_dict()
    make_blocks("subquad.data.lra.listops", options, 0, tmp_path, range(2), workers=1)
    whole = read_block(tmp_path, 1)
    (tmp_path / "1.npz").write_bytes((tmp_path / "1.npz").read_bytes()[:500])
    counts = []
    make_blocks("subquad.data.lra.listops", options, 0, tmp_path, range(2), workers=1, done=counts.append)
    assert "1.npz is damaged and is made again" in caplog.text
    assert counts == [1, 2]
    assert (read_block(tmp_path, 1).tokens == whole.tokens).all()


def test_what_a_process_fails_with_is_raised(tmp_path):
    hopeless = ListOpsConfig(min_length=1990, max_length=1990, leaf=0.999).to_dict()
    with pytest.raises(ValueError, match=r"block [01]: none of 1,000,000 trees has 1990 to 1990 tokens"):
        make_blocks("subquad.data.lra.listops", hopeless, 0, tmp_path, range(2), workers=2)
    with pytest.raises(RuntimeError, match=r"block [01]: KeyError\('difficulty'\)"):
        make_blocks("subquad.data.lra.pathfinder", {"size": 32}, 0, tmp_path, range(2), workers=2)


def test_a_process_that_vanishes_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(RuntimeError, match="has ended early: 2 blocks are missing"):
        make_blocks("subquad.data.lra.listops", SHORT.to_dict(), 0, tmp_path, range(2), workers=2)


def test_rules_with_too_few_sequences_are_refused(tmp_path):
    few = ListOpsConfig(min_length=1, max_length=4, max_depth=2)  # 10 digits and 400 operators of two digits
    with pytest.raises(ValueError, match=r"hardly more than \d+ different examples, and 2,100 are asked for"):
        labelled_corpus(config(tmp_path, listops=few), 30, workers=1)


def test_a_block_that_is_gone_is_named(tmp_path):
    with pytest.raises(OSError, match=r"block 7 in .* is gone: start again"):
        made_module._block(tmp_path, 7)


def test_pathfinder_is_made_in_parts(tmp_path):
    asked = LabelledConfig(
        dataset="pathfinder32",
        examples=30,
        held_out=5,
        cache=str(tmp_path),
        pathfinder=PathfinderConfig(difficulty="easy"),
    )
    corpus = labelled_corpus(asked, 1024, workers=1)
    assert [len(corpus.train), len(corpus.held_out), len(corpus.test)] == [30, 5, 5]
    assert (corpus.vocab_size, corpus.classes) == (256, ("apart", "connected"))
    assert {corpus.train[i]["attention_mask"].sum().item() for i in range(30)} == {1024}
    assert np.max(corpus.train.sequence(0)) > 250
