import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from subquad.data import DataConfig, prepare
from subquad.data import corpus as module
from subquad.data.corpus import prepare_shard
from subquad.data.files import cache_folder
from subquad.data.sources import BadTextError
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


def text_of(texts, names):
    return b"".join((texts / name).read_bytes() for name in names)


def test_bytes_are_the_documents_one_after_another(config, texts):
    corpus = prepare(config.replace(tokenizer="bytes"))
    assert len(corpus.files) == 20
    assert not set(corpus.train_files) & set(corpus.held_out_files)
    for shard, names in ((corpus.train, corpus.train_files), (corpus.held_out, corpus.held_out_files)):
        text = text_of(texts, names)
        assert shard.tokens.astype(np.uint8).tobytes() == text
        assert shard.text_bytes == len(shard) == len(text)
        assert shard.words == len(text.decode().split())
        assert np.diff(shard.documents).tolist() == [(texts / name).stat().st_size for name in names]
    assert corpus.held_out_text() == text_of(texts, corpus.held_out_files)


def test_a_bpe_puts_a_separator_between_documents_and_counts_only_text(config, texts):
    corpus = prepare(config)
    for shard, names in ((corpus.train, corpus.train_files), (corpus.held_out, corpus.held_out_files)):
        text = text_of(texts, names)
        tokens = shard.tokens.tolist()
        decoded = corpus.tokenizer.decode(tokens, skip_special_tokens=False)
        assert decoded == SEPARATOR.join((texts / name).read_text(encoding="utf-8") for name in names)
        assert shard.text_bytes == len(text)
        assert shard.words == len(text.decode().split())
        first = shard.documents[1]
        assert tokens[first - 1] == corpus.tokenizer.token_to_id(SEPARATOR)
        assert corpus.tokenizer.decode(tokens[: first - 1]) == (texts / names[0]).read_text(encoding="utf-8")


def test_a_bpe_learns_from_the_training_documents_only(config, texts):
    corpus = prepare(config)
    for name in corpus.held_out_files:
        (texts / name).write_text("zyxwv " * 500)
    again = prepare(config)
    assert again.fingerprint != corpus.fingerprint
    assert tokenizer_hash(again.tokenizer) == tokenizer_hash(corpus.tokenizer)
    (texts / corpus.train_files[0]).write_text("zyxwv " * 500)
    assert tokenizer_hash(prepare(config).tokenizer) != tokenizer_hash(corpus.tokenizer)


def test_the_same_files_elsewhere_are_the_same_corpus(config, texts, tmp_path):
    corpus = prepare(config)
    moved = texts.rename(tmp_path / "moved")
    again = prepare(config.replace(path=str(moved), cache=str(tmp_path / "other")))
    assert again.fingerprint == corpus.fingerprint
    assert again.folder.name == corpus.folder.name
    for name in ("train.tokens", "held_out.tokens", "tokenizer.json", "held_out.txt", "manifest.json"):
        assert (again.folder / name).read_bytes() == (corpus.folder / name).read_bytes()


def test_a_prepared_corpus_is_opened_not_made_again(config):
    corpus = prepare(config)
    before = corpus.train.path.stat()
    seen = []
    again = prepare(config, progress=lambda *state: seen.append(state))
    assert again.train.path.stat().st_ino == before.st_ino
    assert seen == []


@pytest.mark.parametrize(
    "change",
    [{"held_out": 0.4}, {"split_seed": 1}, {"tokenizer": "bytes"}, {"vocab_size": 280}, {"skip_bad_files": True}],
)
def test_another_configuration_is_another_corpus(config, change):
    assert prepare(config).folder != prepare(config.replace(**change)).folder


def test_changed_content_of_the_same_size_and_time_is_another_corpus(config, texts):
    file = texts / "3.txt"
    before = prepare(config)
    stat = file.stat()
    file.write_bytes(file.read_bytes().replace(b"Document", b"document"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(config).folder != before.folder


def test_progress_tells_what_is_done(config):
    seen = []
    corpus = prepare(config, progress=lambda *state: seen.append(state))
    assert list(dict.fromkeys(what for what, _, _ in seen)) == ["reading", "training the tokenizer", "encoding"]
    assert ("reading", 20, 20) in seen
    assert ("encoding", corpus.train.text_bytes, corpus.train.text_bytes) in seen
    assert all(0 <= done <= total for _, done, total in seen)


@pytest.mark.parametrize(
    "name", ["train.tokens", "held_out.tokens", "tokenizer.json", "held_out.txt", "names.json", "manifest.json"]
)
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_corpus_is_made_again_with_a_warning(config, name, how, caplog):
    corpus = prepare(config)
    file = corpus.folder / name
    good = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(good[:-5])
    with caplog.at_level(logging.WARNING):
        prepare(config)
    assert [r.message.startswith(f"prepared data in {corpus.folder} cannot be used") for r in caplog.records] == [True]
    assert name in caplog.text
    assert file.read_bytes() == good


def test_a_corpus_that_is_swapped_for_another_format_is_made_again(config, caplog):
    corpus = prepare(config)
    manifest = corpus.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 0'))
    prepare(config)
    assert "has corpus format version 0, this release reads version 1" in caplog.text


def test_a_corpus_that_another_process_repaired_meanwhile_stays(config, monkeypatch, tmp_path):
    corpus = prepare(config)
    good = tmp_path / "good"
    shutil.copytree(corpus.folder, good)
    (corpus.folder / "held_out.txt").write_bytes(b"damaged")
    real, published = module._open, []

    def open_and_be_overtaken(folder):
        try:
            return real(folder)
        except ValueError:
            shutil.rmtree(folder)
            good.rename(folder)
            published.append((folder / "train.tokens").stat().st_ino)
            raise

    monkeypatch.setattr(module, "_open", open_and_be_overtaken)
    assert [prepare(config).train.path.stat().st_ino] == published


def test_what_killed_preparations_left_is_swept_after_a_day(config, caplog):
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
    assert {entry.name for entry in cache.iterdir()} == {folder.name, new, other}
    assert f"deleted {cache / old}: the process that wrote it was killed" in caplog.text


def test_processes_prepare_the_same_corpus_at_once(config):
    config.to_file(Path(config.path).parent / "data.yaml")
    code = (
        "import sys; from subquad.data import DataConfig, prepare;"
        "print(prepare(DataConfig.from_file(sys.argv[1])).train.tokens[:].tobytes().hex())"
    )
    command = [sys.executable, "-c", code, str(Path(config.path).parent / "data.yaml")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert len(outputs[0]) > 100
    assert [entry.name for entry in Path(config.cache).iterdir()] == [prepare(config).folder.name]


def test_text_that_changes_while_it_is_read_is_refused(config, texts, monkeypatch):
    real = module._build

    def build(*args):
        real(*args)
        (texts / "3.txt").write_text("changed")

    monkeypatch.setattr(module, "_build", build)
    with pytest.raises(ValueError, match="the text changed while it was read: prepare it again"):
        prepare(config)
    assert list(Path(config.cache).iterdir()) == []


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes("0123456789é".encode() * 10)
    corpus = prepare(DataConfig(path=str(file), held_out=0.1, tokenizer="bytes", cache=str(tmp_path / "cache")))
    assert corpus.held_out_text() == "0123456789é".encode()
    assert len(corpus.train) == 108
    assert corpus.files == corpus.train_files == corpus.held_out_files == ("one.txt",)


def test_held_out_text_may_stand_elsewhere(config, texts, tmp_path):
    (tmp_path / "apart.txt").write_text("held out")
    corpus = prepare(config.replace(held_out_path=str(tmp_path / "apart.txt"), tokenizer="bytes"))
    assert len(corpus.train_files) == 20
    assert corpus.held_out_files == ("apart.txt",)
    assert corpus.held_out_text() == b"held out"
    assert corpus.fingerprint != prepare(config).fingerprint


def test_any_tokenizer_json_will_do(config, tmp_path):
    first = prepare(config)
    again = prepare(config.replace(tokenizer=str(first.folder)))
    assert again.train.tokens.tolist() == first.train.tokens.tolist()
    assert again.folder != first.folder
    with pytest.raises(ValueError, match="unknown tokenizer 'bpee': it is neither a tokenizer"):
        prepare(config.replace(tokenizer="bpee"))


def test_a_small_text_gives_fewer_tokens_with_a_warning(config, caplog):
    corpus = prepare(config.replace(vocab_size=4000))
    size = corpus.tokenizer.get_vocab_size()
    assert corpus.train.vocab_size == corpus.held_out.vocab_size == size < 4000
    assert f"the text is enough for {size} tokens only, not for 4000" in caplog.text


def test_no_text_at_all(tmp_path):
    (tmp_path / "texts").mkdir()
    config = DataConfig(path=str(tmp_path / "texts"), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"there is no text at all in '.*texts'"):
        prepare(config)
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).touch()
    with pytest.raises(ValueError, match=r"there is no text at all in '.*texts'"):
        prepare(config)
    assert list((tmp_path / "cache").iterdir()) == []


def test_bad_input_leaves_no_corpus(config, texts):
    (texts / "bad.bin").write_bytes(b"MZ\x90\0\x03")
    with pytest.raises(BadTextError, match=r"bad\.bin is not text: it has a NUL at byte 3"):
        prepare(config)
    assert list(Path(config.cache).iterdir()) == []
    assert "bad.bin" not in prepare(config.replace(skip_bad_files=True)).files


def test_all_of_a_path_as_one_shard(config, texts):
    shard = prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache)
    text = b"".join(file.read_bytes() for file in sorted(texts.iterdir()))
    assert shard.tokens.astype(np.uint8).tobytes() == text
    assert (shard.text_bytes, len(shard.documents)) == (len(text), 21)
    inode = shard.path.stat().st_ino
    assert prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache).path.stat().st_ino == inode
    assert prepare_shard(str(texts), prepare(config).tokenizer, cache=config.cache).path != shard.path


def test_a_damaged_shard_is_made_again_with_a_warning(config, texts, caplog):
    shard = prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache)
    good = shard.path.read_bytes()
    shard.path.write_bytes(good[:-3])
    assert prepare_shard(str(texts), bytes_tokenizer(), cache=config.cache).path.read_bytes() == good
    assert "is cut short" in caplog.text


def test_the_cache_is_where_one_says(monkeypatch, tmp_path):
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    assert cache_folder(None) == Path.home() / ".cache" / "subquad"
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    assert cache_folder(None) == tmp_path
    assert cache_folder("~/there") == Path.home() / "there"


def test_the_fingerprint_is_pinned(config):
    assert prepare(config).fingerprint[:16] == "0ea5ececaaa75e52"
    assert hashlib.sha256(prepare(config).held_out_text()).hexdigest()[:16] == "2a51abfc0505f438"
