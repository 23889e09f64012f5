"""Sets of token shards: read as one, windows of them, damaged shards, corpora of them, and how they are written."""

import json
import logging
import pickle
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.config import digest
from subquad.data import DataConfig, TokenSet, TokenShard, prepare, token_set, windows_of, write_tokens
from subquad.data.sources import open_source
from subquad.data.token_set import INDEX, ShardError, is_token_set
from subquad.data.tokenizers import load_tokenizer
from subquad.data.vocabularies import train_bpe
from subquad.data.windows import SetWindows
from tests.data.sets import flip, make_set

SHARDS = [[7, 5], [20], [3, 3, 3, 2], [9, 9]]
ENDS = [12, 32, 43, 61]
NAMES = [f"{number:05d}.tokens" for number in range(4)]


@pytest.fixture
def folder(tmp_path):
    return make_set(tmp_path / "set", SHARDS).path


@pytest.fixture
def opened(monkeypatch):
    """The names of the shards that are opened, in order."""
    names = []
    shard = lambda path, **options: names.append(path.name) or TokenShard(path, **options)  # noqa: E731
    monkeypatch.setattr(token_set, "TokenShard", shard)
    return names


def ids(windows):
    return [windows[i]["input_ids"].tolist() for i in range(len(windows))]


@settings(max_examples=50)
@given(st.integers(-70, 70), st.integers(-70, 70))
def test_tokens_are_read_across_shards(tmp_path_factory, start, stop):
    folder = tmp_path_factory.getbasetemp() / "across"
    tokens = TokenSet(folder) if folder.exists() else make_set(folder, SHARDS)
    assert tokens.tokens[start:stop].tolist() == list(range(61))[start:stop]


def test_the_index_says_what_there_is_and_reading_opens_only_the_shards_it_needs(folder, opened, monkeypatch):
    tokens = TokenSet(folder)
    assert (len(tokens), tokens.text_bytes, tokens.words, tokens.vocab_size) == (61, 61, 9, 70000)
    assert repr(tokens).endswith("set': 61 tokens in 4 shards)")
    assert len(windows_of(tokens, 6)) == 2 + 3 + 2 + 3
    assert opened == []
    assert tokens.tokens[14:30].tolist() == list(range(14, 30))
    assert opened == NAMES[1:2]
    assert tokens.tokens[30:34].tolist() == list(range(30, 34))
    assert opened == NAMES[1:3]
    opened.clear()
    windows = windows_of(TokenSet(folder), 6)
    for index in (6, 5, 6):
        windows[index]
    assert windows.place(6) == (2, 1)
    assert opened == NAMES[2:3]
    opened.clear()
    monkeypatch.setattr(token_set, "OPEN_SHARDS", 2)
    tokens = TokenSet(folder)
    for number in (0, 1, 0, 2, 1, 0):
        tokens.shard(number)
    assert opened == [*NAMES[:3], NAMES[0]], "the oldest one was closed"


def test_shards_by_name_in_another_order_and_in_another_process(folder):
    assert TokenSet(folder).documents.tolist() == np.cumsum([0, *(n for shard in SHARDS for n in shard)]).tolist()
    tokens = TokenSet(folder, [NAMES[2], NAMES[0]], bad_shards="skip")
    assert tokens.tokens[:].tolist() == [*range(32, 43), *range(12)]
    assert tokens.fingerprint != TokenSet(folder).fingerprint
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 500
    again = pickle.loads(pickled)  # noqa: S301
    assert (again.fingerprint, again.bad_shards) == (tokens.fingerprint, "skip")


@pytest.mark.parametrize(("call", "message"), [
    (lambda tokens: tokens.tokens[::2], "tokens of a set are read in slices of step 1, got 2"),
    (lambda tokens: TokenSet(tokens.path, ["00009.tokens"]), r"set has no shard '00009\.tokens'; .*00000\.tokens"),
    (lambda tokens: TokenSet(tokens.path, NAMES[2:3] * 2), "each shard can be named only once, got 00002.tokens"),
    (lambda tokens: TokenSet(tokens.path, []), "a set needs at least one shard of"),
    (lambda tokens: TokenSet(tokens.path.parent), r"holds no index\.json; `subquad data tokens` writes a folder"),
    (lambda tokens: windows_of(tokens, 6)[10], "window 10 is out of range: there are 10"),
    (lambda tokens: windows_of(tokens, 21), r"a window of 21 tokens is longer than every shard of .*set"),
    (lambda tokens: windows_of(tokens, 8, pack="documents", stride=3), "packed documents .* no stride, got stride=3"),
    (lambda tokens: SetWindows(tokens, [1] * 4)[0], r"SetWindows must define part \(SetWindows is abstract\)"),
])  # fmt: skip
def test_wrong_names_and_places_are_refused(folder, call, message):
    with pytest.raises((ValueError, IndexError, FileNotFoundError, NotImplementedError), match=message):
        call(TokenSet(folder))


def change_index(folder, change, reseal=True):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    if reseal:
        index["sha256"] = digest({name: index[name] for name in ("tokenizer_hash", "vocab_size", "shards")})
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(("change", "reseal", "message"), [
    (lambda index: index.update(version=2), True, "has format 'subquad-tokens' version 2; this release reads"),
    (lambda index: index["shards"][1].update(tokens=19), False, r"index\.json is damaged: its checksum is wrong"),
    (lambda index: index["shards"][1].update(tokens=19), True, r"is not the shard of the index: it has 20 .* not 19"),
    (lambda index: index.update(shards={}), True, r"index\.json is damaged: 'shards' must be a list"),
    (lambda index: index["shards"][0].update(words="3"), True, r"index\.json is damaged: 'words' must be a"),
    (lambda index: index["shards"][0].update(tokens=-1), True, r"tokens of 00000\.tokens must .* 2\^48, got -1"),
    (lambda index: index["shards"][0].update(name="../a"), True, r"must be a file in the folder .*, got '\.\./a'"),
])  # fmt: skip
def test_an_index_that_cannot_be_is_refused(folder, change, reseal, message):
    change_index(folder, change, reseal)
    with pytest.raises(ValueError, match=message):
        TokenSet(folder).shard(1)


def test_a_text_folder_may_hold_an_index_of_its_own(folder, tmp_path):
    (tmp_path / INDEX).write_text("[1, 2]")
    assert [is_token_set(place) for place in (folder, tmp_path, tmp_path / "no")] == [True, False, False]
    (folder / INDEX).write_text("[1, 2")
    assert is_token_set(folder), "a damaged one too"


@pytest.mark.parametrize(("spoil", "message"), [
    (flip, "is damaged: the checksum of its tokens is wrong"),
    (lambda file: file.unlink(), "No such file"),
    (lambda file: make_set(file.parent / "x", [[1], [20]]).shard(1).path.replace(file), "the index: it has 20 tokens"),
], ids=["flipped", "missing", "swapped"])  # fmt: skip
def test_a_bad_shard_is_named_or_skipped_and_the_others_keep_their_places(folder, spoil, message, caplog):
    whole = ids(windows_of(TokenSet(folder), 6))
    spoil(folder / NAMES[1])
    windows = windows_of(TokenSet(folder), 6)
    assert [windows[i]["input_ids"].tolist() for i in (0, 5)] == [whole[0], whole[5]], "the others are read"
    for _ in range(2):
        with pytest.raises(ShardError, match=rf"{NAMES[1]} of .*set cannot be read: .*{message}.*bad_shards=skip"):
            windows[2]
    with caplog.at_level(logging.WARNING):
        found = ids(windows_of(TokenSet(folder, bad_shards="skip"), 6))
    assert found == [*whole[:2], whole[5], whole[6], whole[5], *whole[5:]], "windows of the next shard"
    (record,) = caplog.records
    assert "3 windows are replaced by others: shard 00001.tokens of" in record.message


def test_shards_one_after_another_are_bad(folder, caplog):
    for name in NAMES[1:3]:
        flip(folder / name)
    windows = windows_of(TokenSet(folder, bad_shards="skip"), 6)
    assert windows[2]["input_ids"].tolist() == list(range(43, 49))
    assert len(caplog.records) == 2
    for name in (NAMES[0], NAMES[3]):
        flip(folder / name)
    with pytest.raises(ShardError, match=r"no shard of .* can be read; the warnings above say why"):
        windows_of(TokenSet(folder, bad_shards="skip"), 6)[0]


@pytest.mark.parametrize(("length", "stride"), [(6, None), (6, 2), (10, 3), (13, None)])
def test_windows_stop_at_the_end_of_a_shard(folder, length, stride):
    for item in ids(windows_of(TokenSet(folder), length, stride=stride)):
        assert item == list(range(item[0], item[0] + length))
        assert not any(item[0] < end <= item[-1] for end in ENDS)


def packed(folder, **options):
    return windows_of(TokenSet(folder, **options), 8, pack="documents", cache=str(folder.parent / "cache"))


def test_documents_are_packed_once_and_later_readers_open_their_own_shards(folder, opened):
    windows = packed(folder)
    assert opened == NAMES
    found = [windows[i] for i in range(len(windows))]
    predicted = [int(label) for item in found for label in item["labels"] if label != -100]
    firsts = set(TokenSet(folder).documents.tolist())
    assert sorted(predicted) == [token for token in range(61) if token not in firsts]
    assert windows.padding == sum(int((item["doc_ids"] < 0).sum()) for item in found) / (8 * len(windows))
    opened.clear()
    again = packed(folder)
    assert again.counts == windows.counts
    assert again[len(again) - 1]["input_ids"].tolist() == found[-1]["input_ids"].tolist()
    assert opened == NAMES[3:]
    flip(windows.folder / "00000.npy", -1)
    with pytest.raises(ValueError, match=r"00000\.npy is damaged: its checksum is wrong; delete .*packing-"):
        packed(folder)[0]


def test_a_bad_shard_is_left_out_of_a_packing(folder, caplog):
    flip(folder / NAMES[1])
    with pytest.raises(ShardError, match=r"shard 00001\.tokens of"):
        packed(folder)
    windows = packed(folder, bad_shards="skip")
    assert windows.counts[1] == 0
    assert "left out of the packing: shard 00001.tokens" in caplog.text
    assert not {token for item in ids(windows) for token in item} & set(range(12, 32))
    assert packed(folder, bad_shards="skip").folder == windows.folder
    flip(folder / NAMES[1])
    assert packed(folder).counts[1] == 3


def config(folder, **values):
    return DataConfig(path=str(folder), **({"tokenizer": "bytes", "held_out": 0.2} | values))


def test_a_corpus_of_shards_holds_the_last_or_the_named_ones_out(folder, opened):
    corpus = prepare(config(folder))
    assert (corpus.train_files, corpus.held_out_files) == (tuple(NAMES[:3]), tuple(NAMES[3:]))
    assert (len(corpus.train), len(corpus.held_out)) == (43, 18)
    assert prepare(config(folder, held_out=0.3)).held_out_files == tuple(NAMES[2:])
    assert len(prepare(config(folder, held_out=0.99)).train_files) == 1
    named = prepare(config(folder, held_out_shards=NAMES[1:2], bad_shards="skip"))
    assert named.held_out_files == tuple(NAMES[1:2])
    assert (named.train.bad_shards, named.held_out.bad_shards) == ("skip", "stop")
    assert opened == []
    with pytest.raises(ValueError, match="holds token shards without their text; decode them with the tokenizer"):
        corpus.held_out_text()


def test_shards_and_their_tokenizer_must_fit(folder, tmp_path):
    make_set(tmp_path / "other", [[4, 4]])
    text, other = tmp_path / "t.txt", str(tmp_path / "other")
    text.write_text("some words and some other words " * 20)
    corpus = prepare(config(folder, held_out_path=other))
    assert (len(corpus.train), len(corpus.held_out)) == (61, 8)
    bpe = prepare(DataConfig(path=str(text), vocab_size=260, cache=str(tmp_path / "cache"))).folder
    for values, message in (
        ({"held_out_shards": ["x"]}, "set has no shard 'x'"),
        ({"held_out_shards": []}, "at least one of the shards .* must be held out and one be left"),
        ({"held_out_shards": NAMES}, "at least one of the shards .* must be held out and one be left"),
        ({"held_out_path": other, "held_out_shards": NAMES[:1]}, "both name a held-out part: leave one out"),
        ({"held_out_path": str(text)}, "held_out_path must be a folder of token shards, like path, got"),
        ({"tokenizer": str(bpe)}, "was made with another tokenizer than tokenizer="),
        ({"path": str(text), "held_out_shards": ["a"]}, "held_out_shards is only for a folder of token shards, and"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(config(folder).replace(**values))
    change_index(tmp_path / "other", lambda index: index.update(tokenizer_hash="b" * 64))
    with pytest.raises(ValueError, match=r"other was made with another tokenizer than .*set"):
        prepare(config(folder, held_out_path=other))
    change_index(folder, lambda index: index.update(tokenizer_hash="b" * 64))
    with pytest.raises(ValueError, match=r"was made with another tokenizer than its tokenizer\.json"):
        prepare(config(folder))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_texts_become_shards(tmp_path, tokenizer):
    texts, said, folder, out = [f"document {n} " * (n + 1) for n in range(9)], [], tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text(text)
    sources = [open_source(str(folder)), str(folder / "0.txt")]
    texts.append(texts[0])
    chosen = load_tokenizer("bytes") if tokenizer == "bytes" else train_bpe(texts, 265)
    tokens = write_tokens(out, sources, chosen, shard_tokens=100, progress=lambda *state: said.append(state))
    assert said[-1] == ("encoding", 10, 10)
    assert all(entry.tokens >= 100 for entry in tokens.entries[:-1])
    assert sum(entry.documents for entry in tokens.entries) == 10
    assert tokens.text_bytes == sum(map(len, texts))
    spans = list(pairwise(tokens.documents))
    assert [chosen.decode(tokens.tokens[a:b].tolist(), skip_special_tokens=True) for a, b in spans] == texts
    if tokenizer == "bpe":
        assert all(tokens.tokens[int(end) - 1 : int(end)] == 0 for _, end in spans), "each ends with the separator"
    assert prepare(config(out, tokenizer="bpe")).tokenizer.to_str() == chosen.to_str()


def test_shards_that_cannot_be_written_leave_nothing(tmp_path):
    broken = SimpleNamespace(asked="b", names=[], documents=lambda: iter([SimpleNamespace(text=b"a"), 1 / 1]))
    for source, error, message in (
        (str(tmp_path), ValueError, f"no text found in {re.escape(repr(str(tmp_path)))}"),
        (broken, AttributeError, "text"),
    ):
        with pytest.raises(error, match=message):
            write_tokens(tmp_path / "out", [source], load_tokenizer("bytes"), shard_tokens=1)
    assert list(tmp_path.iterdir()) == []
