"""Corpora: what they hold, that they are prepared once, and that nothing damaged is used."""

import hashlib
import logging
import multiprocessing
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

from subquad.data import DataConfig, prepare
from subquad.data import corpus as module
from subquad.data.corpus import prepare_shard
from subquad.data.texts import BadTextError
from subquad.data.tokenizers import bytes_tokenizer, tokenizer_hash
from subquad.data.vocabularies import SEPARATOR


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"Document {i} says: größer, {'more ' * i}\n", encoding="utf-8")
    return folder


@pytest.fixture
def config(texts, tmp_path):
    return DataConfig(path=str(texts), held_out=0.2, vocab_size=290, cache=str(tmp_path / "cache"))


def cached(config):
    return [entry.name for entry in Path(config.cache).iterdir()]


@pytest.mark.parametrize(("tokenizer", "separator"), [("bytes", ""), ("bpe", SEPARATOR)])
def test_shards_hold_the_documents_and_count_their_text_alone(config, texts, tokenizer, separator):
    corpus = prepare(config.replace(tokenizer=tokenizer))
    assert len(corpus.files) == len(corpus.train_files) + len(corpus.held_out_files) == 20
    for shard, names in ((corpus.train, corpus.train_files), (corpus.held_out, corpus.held_out_files)):
        documents = [(texts / name).read_text(encoding="utf-8") for name in names]
        text = "".join(documents)
        assert (shard.text_bytes, shard.words) == (len(text.encode()), len(text.split()))
        parts = [shard.tokens[a:b] for a, b in pairwise(shard.documents)]
        read = [corpus.tokenizer.decode(part, skip_special_tokens=False) for part in parts]
        assert read == [*(document + separator for document in documents[:-1]), documents[-1]]
    assert corpus.held_out_text() == text.encode()


def test_a_bpe_learns_from_the_training_documents_only(config, texts):
    corpus = prepare(config)
    for name in corpus.held_out_files:
        (texts / name).write_text("zyxwv " * 500)
    again = prepare(config)
    assert again.fingerprint != corpus.fingerprint
    assert tokenizer_hash(again.tokenizer) == tokenizer_hash(corpus.tokenizer)
    (texts / corpus.train_files[0]).write_text("zyxwv " * 500)
    assert tokenizer_hash(prepare(config).tokenizer) != tokenizer_hash(corpus.tokenizer)


def test_the_same_files_are_the_same_corpus_everywhere(config, texts, tmp_path):
    corpus = prepare(config)
    assert corpus.fingerprint[:16] == "0ea5ececaaa75e52"
    assert hashlib.sha256(corpus.held_out_text()).hexdigest()[:16] == "2a51abfc0505f438"
    moved = texts.rename(tmp_path / "moved")
    again = prepare(config.replace(path=str(moved), cache=str(tmp_path / "other")))
    assert (again.fingerprint, again.folder.name) == (corpus.fingerprint, corpus.folder.name)
    for name in ("train.tokens", "held_out.tokens", "tokenizer.json", "held_out.txt", "manifest.json"):
        assert (again.folder / name).read_bytes() == (corpus.folder / name).read_bytes()


def test_a_corpus_is_prepared_once_and_tells_its_progress(config):
    seen = []
    corpus = prepare(config, progress=lambda *state: seen.append(state))
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["reading", "training the tokenizer", "encoding"]
    assert {("reading", 20, 20), ("encoding", corpus.train.text_bytes, corpus.train.text_bytes)} <= set(seen)
    assert all(0 <= done <= total for _, done, total in seen)
    before, seen[:] = corpus.train.path.stat(), []
    again = prepare(config, progress=lambda *state: seen.append(state))
    assert again.train.path.stat().st_ino == before.st_ino
    assert seen == []


def test_another_configuration_or_content_is_another_corpus(config, texts):
    changes = [
        {}, {"held_out": 0.4}, {"split_seed": 1}, {"tokenizer": "bytes"}, {"vocab_size": 280}, {"skip_bad_files": True}
    ]  # fmt: skip
    folders = {prepare(config.replace(**change)).folder for change in changes}
    file = texts / "3.txt"
    stat = file.stat()
    file.write_bytes(file.read_bytes().replace(b"Document", b"document"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time
    assert len({*folders, prepare(config).folder}) == 7


@pytest.mark.parametrize(("name", "change", "message"), [
    *((name, lambda raw: raw[:-5], name) for name in ("train.tokens", "held_out.tokens", *module.PLAIN)),
    ("manifest.json", lambda raw: raw[:-5], "manifest.json"),
    ("train.tokens", None, "train.tokens"),
    ("manifest.json", None, "manifest.json"),
    ("manifest.json", lambda raw: raw.replace(b'"version": 1', b'"version": 0'), "has corpus format version 0, this"),
])  # fmt: skip
def test_a_damaged_corpus_is_rebuilt_with_a_warning(config, name, change, message, caplog):
    corpus = prepare(config)
    file = corpus.folder / name
    good = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(change(good))
    with caplog.at_level(logging.WARNING):
        prepare(config)
    (record,) = caplog.records
    assert record.message.startswith(f"prepared data in {corpus.folder} is damaged and will be rebuilt: ")
    assert message in record.message
    assert file.read_bytes() == good
    assert cached(config) == [corpus.folder.name]


def test_a_corpus_that_another_process_repaired_meanwhile_stays(config, monkeypatch, tmp_path):
    corpus = prepare(config)
    good = shutil.copytree(corpus.folder, tmp_path / "good")
    inode, real = (good / "train.tokens").stat().st_ino, module._open
    (corpus.folder / "held_out.txt").write_bytes(b"damaged")

    def open_and_be_overtaken(folder):
        try:
            return real(folder)
        except ValueError:
            shutil.rmtree(folder)
            good.rename(folder)
            raise

    monkeypatch.setattr(module, "_open", open_and_be_overtaken)
    assert prepare(config).train.path.stat().st_ino == inode


def test_leftovers_of_killed_preparations_are_swept_after_a_day(config, caplog):
    folder = prepare(config).folder
    cache, old, new, other = folder.parent, f".{folder.name}.{'0a' * 16}", f".corpus-xy.{'1b' * 16}", ".corpus-notes"
    yesterday = time.time() - 25 * 3600
    for name in (old, new, other):
        (cache / name).mkdir()
        (cache / name / "text").write_text("half")
        os.utime(cache / name, (yesterday, yesterday))
        if name != new:  # its file is being written, which leaves the folder's own time
            os.utime(cache / name / "text", (yesterday, yesterday))
    prepare(config)
    assert set(cached(config)) == {folder.name, new, other}
    assert f"deleted {cache / old}: the process that wrote it was killed" in caplog.text


def train_tokens(config):
    return bytes(prepare(config).train.tokens)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_prepare_the_same_corpus_at_once(config):
    fork = multiprocessing.get_context("fork")
    with fork.Pool(3, fork.Barrier(3).wait) as pool:
        found = pool.map_async(train_tokens, [config] * 3, chunksize=1).get(timeout=60)
    assert found == [train_tokens(config)] * 3
    assert cached(config) == [prepare(config).folder.name]


def test_text_that_changes_while_it_is_read_is_refused(config, texts):
    with pytest.raises(ValueError, match="the text changed while it was read: prepare it again"):
        prepare(config, progress=lambda *_: (texts / "3.txt").write_text("changed"))
    assert cached(config) == []


def test_a_single_file_is_split_and_a_file_apart_is_held_out(config, tmp_path):
    one, apart = tmp_path / "one.txt", tmp_path / "apart.txt"
    one.write_bytes("0123456789é".encode() * 10)
    apart.write_text("held out")
    config = config.replace(path=str(one), held_out=0.1, tokenizer="bytes")
    corpus = prepare(config)
    assert corpus.held_out_text() == "0123456789é".encode()
    assert len(corpus.train) == 108
    assert corpus.files == corpus.train_files == corpus.held_out_files == ("one.txt",)
    other = prepare(config.replace(held_out_path=str(apart)))
    assert other.held_out_text() == b"held out"
    assert (other.train_files, other.held_out_files, len(other.train)) == (("one.txt",), ("apart.txt",), 120)
    assert other.fingerprint != corpus.fingerprint


def test_a_tokenizer_may_be_given_and_a_small_text_trains_few_tokens(config, caplog):
    first = prepare(config)
    again = prepare(config.replace(tokenizer=str(first.folder)))
    assert again.train.tokens.tolist() == first.train.tokens.tolist()
    assert again.folder != first.folder
    small = prepare(config.replace(vocab_size=4000))
    size = small.tokenizer.get_vocab_size()
    assert small.train.vocab_size == small.held_out.vocab_size == size < 4000
    assert f"the text yields a vocabulary of {size} tokens only, not 4000" in caplog.text


def test_bad_input_leaves_no_corpus(config, texts, tmp_path):
    (texts / "bad.bin").write_bytes(b"MZ\x90\0\x03")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadTextError, match=r"bad\.bin is not text: it has a NUL at byte 3"):
        prepare(config)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no text found in '.*empty': .*; give a file, a folder or an arch"):
            prepare(config.replace(path=str(tmp_path / "empty")))
        (tmp_path / "empty" / "a.txt").touch()
        (tmp_path / "empty" / "b.txt").touch()
    assert cached(config) == []
    assert "bad.bin" not in prepare(config.replace(skip_bad_files=True)).files


def test_all_of_a_path_as_one_shard_is_prepared_once_too(config, texts, caplog):
    shard = prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache)
    good = shard.path.read_bytes()
    assert bytes(shard.tokens.astype("u1")) == b"".join(file.read_bytes() for file in sorted(texts.iterdir()))
    assert (shard.text_bytes, len(shard.documents)) == (len(shard), 21)
    inode = shard.path.stat().st_ino
    assert prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache).path.stat().st_ino == inode
    assert prepare_shard(str(texts), prepare(config).tokenizer, cache=config.cache).path != shard.path
    shard.path.write_bytes(good[:-3])
    assert prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache).path.read_bytes() == good
    assert "is cut short" in caplog.text
