import json
import logging
import pickle
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.config import digest
from subquad.data import DataConfig, TokenSet, TokenShard, prepare, token_set, windows_of, write_tokens
from subquad.data.shards import HEAD_BYTES
from subquad.data.sources import open_source
from subquad.data.token_set import INDEX, ShardError, is_token_set
from subquad.data.tokenizers import load_tokenizer
from subquad.data.windows import SetWindows
from tests.data.sets import flip, make_set

SHARDS = [[7, 5], [20], [3, 3, 3, 2], [9, 9]]
ENDS = [12, 32, 43, 61]


@pytest.fixture
def folder(tmp_path):
    make_set(tmp_path / "set", SHARDS)
    return tmp_path / "set"


@pytest.fixture
def opened(monkeypatch):
    """The names of the shards that are opened, as they are."""
    names = []
    real = TokenShard.__init__

    def init(self, path, **kwargs):
        names.append(path.name)
        real(self, path, **kwargs)

    monkeypatch.setattr(TokenShard, "__init__", init)
    return names


def test_the_index_alone_says_what_there_is(folder, opened):
    tokens = TokenSet(folder)
    assert len(tokens) == 61
    assert (tokens.text_bytes, tokens.words, tokens.vocab_size) == (61, 9, 70000)
    assert repr(tokens).endswith("set': 61 tokens in 4 shards)")
    assert len(windows_of(tokens, 6)) == 2 + 3 + 2 + 3
    assert is_token_set(folder)
    assert not is_token_set(folder.parent)
    assert opened == []


@given(st.integers(-70, 70), st.integers(-70, 70))
def test_tokens_are_read_across_shards(tmp_path_factory, start, stop):
    folder = tmp_path_factory.getbasetemp() / "across"
    tokens = TokenSet(folder) if folder.exists() else make_set(folder, SHARDS)
    assert tokens.tokens[start:stop].tolist() == list(range(61))[start:stop]


def test_a_slice_opens_the_shards_that_it_needs(folder, opened):
    tokens = TokenSet(folder)
    assert tokens.tokens[14:30].tolist() == list(range(14, 30))
    assert opened == ["00001.tokens"]
    assert tokens.tokens[30:34].tolist() == list(range(30, 34))
    assert opened == ["00001.tokens", "00002.tokens"]
    with pytest.raises(ValueError, match="tokens of a set are read in slices of step 1, got 2"):
        tokens.tokens[::2]


def test_documents_are_those_of_all_shards(folder):
    assert TokenSet(folder).documents.tolist() == np.cumsum([0, *(n for shard in SHARDS for n in shard)]).tolist()


def test_shards_by_name_in_another_order(folder):
    tokens = TokenSet(folder, ["00002.tokens", "00000.tokens"])
    assert tokens.tokens[:].tolist() == [*range(32, 43), *range(12)]
    assert tokens.fingerprint != TokenSet(folder).fingerprint
    with pytest.raises(ValueError, match=r"set has no shard '00009\.tokens'; .*00000\.tokens"):
        TokenSet(folder, ["00009.tokens"])
    with pytest.raises(ValueError, match=r"each shard can be named once, got 00002\.tokens, 00002\.tokens"):
        TokenSet(folder, ["00002.tokens"] * 2)
    with pytest.raises(ValueError, match="a set needs at least one shard of"):
        TokenSet(folder, [])


def test_another_process_opens_it_again(folder):
    tokens = TokenSet(folder, ["00001.tokens"], bad_shards="skip")
    tokens.shard(0)
    data = pickle.dumps(tokens)
    assert len(data) < 500
    again = pickle.loads(data)  # noqa: S301
    assert again.fingerprint == tokens.fingerprint
    assert again.bad_shards == "skip"


def test_few_shards_stay_open(folder, opened, monkeypatch):
    monkeypatch.setattr(token_set, "OPEN_SHARDS", 2)
    tokens = TokenSet(folder)
    for number in (0, 1, 0, 2, 1):
        tokens.shard(number)
    assert opened == ["00000.tokens", "00001.tokens", "00002.tokens"]
    tokens.shard(0)
    assert opened[3:] == ["00000.tokens"]


def test_no_index(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no index\.json; `subquad data tokens` makes a folder"):
        TokenSet(tmp_path)


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_another_index_version(folder):
    change_index(folder, lambda index: index.update(version=2))
    with pytest.raises(ValueError, match="has format 'subquad-tokens' version 2; this release reads"):
        TokenSet(folder)


def test_a_changed_index(folder):
    change_index(folder, lambda index: index["shards"][1].update(tokens=19))
    with pytest.raises(ValueError, match=r"index\.json is damaged: its checksum is wrong"):
        TokenSet(folder)


def reseal(index):
    index["sha256"] = digest({name: index[name] for name in ("tokenizer_hash", "vocab_size", "shards")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(shards={}), r"index\.json is damaged: 'shards' must be a list"),
        (lambda index: index["shards"][0].update(words="3"), r"index\.json is damaged: 'words' must be a int"),
        (
            lambda index: index["shards"][0].update(tokens=-1),
            r"tokens of 00000\.tokens must be at least 0 and below 2\^48, got -1",
        ),
        (lambda index: index["shards"][1].update(words=2**64), r"words of 00001\.tokens must be .*below 2\^48"),
        (lambda index: index["shards"][0].update(name="../a"), r"is a file in the folder of its index, got '\.\./a'"),
        (lambda index: index["shards"][0].update(name=""), "is a file in the folder of its index, got ''"),
    ],
)
def test_an_index_that_cannot_be(folder, change, message):
    change_index(folder, lambda index: (change(index), reseal(index)))
    with pytest.raises(ValueError, match=message):
        TokenSet(folder)


def test_an_index_with_another_count_of_tokens(folder):
    change_index(folder, lambda index: (index["shards"][1].update(tokens=19), reseal(index)))
    with pytest.raises(
        ShardError, match=r"00001\.tokens of .*: it is another shard than the index has: 20 tokens, SHA-256 .*, not 19"
    ):
        TokenSet(folder).shard(1)


def test_a_text_folder_may_hold_an_index_of_its_own(folder, tmp_path):
    (tmp_path / INDEX).write_text("[1, 2]")
    assert not is_token_set(tmp_path)
    (folder / INDEX).write_text("[1, 2")
    assert is_token_set(folder)
    with pytest.raises(ValueError, match=r"index\.json is not JSON"):
        TokenSet(folder)


def swap(folder):
    (folder / "00001.tokens").write_bytes((folder / "00003.tokens").read_bytes())


DAMAGE = {
    "a bit flipped": (lambda folder: flip(folder / "00001.tokens"), "is damaged: the checksum of its tokens is wrong"),
    "cut short": (
        lambda folder: (folder / "00001.tokens").write_bytes((folder / "00001.tokens").read_bytes()[:-1]),
        "is cut short or too long",
    ),
    "missing": (lambda folder: (folder / "00001.tokens").unlink(), "No such file"),
    "another shard": (swap, "it is another shard than the index has: 18 tokens, SHA-256"),
}
damaged = pytest.mark.parametrize("how", DAMAGE)


@damaged
def test_a_bad_shard_is_named_when_it_is_read(folder, how):
    spoil, message = DAMAGE[how]
    spoil(folder)
    windows = windows_of(TokenSet(folder), 6)
    assert windows[0]["input_ids"].tolist() == list(range(6)), "the others are read"
    assert windows[5]["input_ids"].tolist() == list(range(32, 38))
    for _ in range(2):
        with pytest.raises(
            ShardError, match=rf"shard 00001\.tokens of .*set cannot be read: .*{message}.*bad_shards=skip"
        ):
            windows[2]


@damaged
def test_a_bad_shard_is_skipped_and_the_others_keep_their_places(folder, how, caplog):
    whole = windows_of(TokenSet(folder), 6)
    expected = [whole[i]["input_ids"].tolist() for i in range(len(whole))]
    DAMAGE[how][0](folder)
    windows = windows_of(TokenSet(folder, bad_shards="skip"), 6)
    with caplog.at_level(logging.WARNING):
        found = [windows[i]["input_ids"].tolist() for i in range(len(windows))]
    assert found[:2] == expected[:2]
    assert found[5:] == expected[5:]
    assert found[2:5] == [expected[5], expected[6], expected[5]], "windows of the next shard"
    (record,) = caplog.records
    assert "3 windows are replaced by others: shard 00001.tokens of" in record.message


def test_shards_one_after_another_are_bad(folder, caplog):
    for name in ("00001.tokens", "00002.tokens"):
        flip(folder / name)
    windows = windows_of(TokenSet(folder, bad_shards="skip"), 6)
    assert windows[2]["input_ids"].tolist() == list(range(43, 49))
    assert len(caplog.records) == 2
    for name in ("00000.tokens", "00003.tokens"):
        flip(folder / name)
    windows = windows_of(TokenSet(folder, bad_shards="skip"), 6)
    with pytest.raises(ShardError, match=r"no shard of .* can be read; the warnings before this one say why"):
        windows[0]


def test_windows_open_the_shards_that_they_are_in(folder, opened):
    windows = windows_of(TokenSet(folder), 6)
    for index in (6, 5, 6):
        windows[index]
    assert opened == ["00002.tokens"]
    assert windows.place(6) == (2, 1)
    for index in (-1, 10):
        with pytest.raises(IndexError, match=f"window {index} is out of range: there are 10"):
            windows[index]


def test_windows_stop_at_the_end_of_a_shard(folder):
    for length, stride in ((6, None), (6, 2), (10, 3), (13, None)):
        windows = windows_of(TokenSet(folder), length, stride=stride)
        for i in range(len(windows)):
            item = windows[i]["input_ids"].tolist()
            assert item == list(range(item[0], item[0] + length))
            assert sum(item[0] < end <= item[-1] for end in ENDS) == 0
    with pytest.raises(ValueError, match=r"a window of 21 tokens is longer than every shard of .*set"):
        windows_of(TokenSet(folder), 21)
    with pytest.raises(ValueError, match="stride must be between 1 and 5, got 6"):
        windows_of(TokenSet(folder), 6, stride=6)


def test_documents_are_packed_once_and_later_readers_open_their_own_shards(folder, tmp_path, opened):
    cache = str(tmp_path / "cache")
    windows = windows_of(TokenSet(folder), 8, pack="documents", cache=cache)
    assert opened == [f"{n:05d}.tokens" for n in range(4)]
    found = [windows[i] for i in range(len(windows))]
    predicted = [int(label) for item in found for label in item["labels"] if label != -100]
    firsts = set(TokenSet(folder).documents.tolist())
    assert sorted(predicted) == [token for token in range(61) if token not in firsts]
    assert windows.padding == sum(int((item["doc_ids"] < 0).sum()) for item in found) / (8 * len(windows))
    opened.clear()
    again = windows_of(TokenSet(folder), 8, pack="documents", cache=cache)
    assert again.counts == windows.counts
    assert again[len(again) - 1]["input_ids"].tolist() == found[-1]["input_ids"].tolist()
    assert opened == ["00003.tokens"]
    with pytest.raises(ValueError, match="packed documents have no stride"):
        windows_of(TokenSet(folder), 8, pack="documents", stride=3)


def test_a_damaged_packing_is_named(folder, tmp_path):
    cache = str(tmp_path / "cache")
    windows = windows_of(TokenSet(folder), 8, pack="documents", cache=cache)
    flip(windows.folder / "00000.npy", -1)
    with pytest.raises(ValueError, match=r"00000\.npy is damaged: its checksum is wrong; delete .*packing-"):
        windows_of(TokenSet(folder), 8, pack="documents", cache=cache)[0]


def test_a_bad_shard_is_left_out_of_a_packing(folder, tmp_path, caplog):
    flip(folder / "00001.tokens")
    cache = str(tmp_path / "cache")
    with pytest.raises(ShardError, match=r"shard 00001\.tokens of"):
        windows_of(TokenSet(folder), 8, pack="documents", cache=cache)
    windows = windows_of(TokenSet(folder, bad_shards="skip"), 8, pack="documents", cache=cache)
    assert windows.counts[1] == 0
    assert "left out of the packing: shard 00001.tokens" in caplog.text
    read = {int(token) for i in range(len(windows)) for token in windows[i]["input_ids"]}
    assert not read & set(range(12, 32))
    assert windows_of(TokenSet(folder, bad_shards="skip"), 8, pack="documents", cache=cache).folder == windows.folder
    flip(folder / "00001.tokens")
    assert windows_of(TokenSet(folder), 8, pack="documents", cache=cache).counts[1] == 3


def test_a_set_of_windows_is_abstract(folder):
    with pytest.raises(NotImplementedError, match=r"SetWindows must define part \(SetWindows is abstract\)"):
        SetWindows(TokenSet(folder), [1, 1, 1, 1])[0]


def config(folder, **values):
    return DataConfig(path=str(folder), **({"tokenizer": "bytes", "held_out": 0.2} | values))


def test_a_corpus_of_shards_holds_the_last_ones_out(folder, opened):
    corpus = prepare(config(folder))
    assert corpus.train_files == ("00000.tokens", "00001.tokens", "00002.tokens")
    assert corpus.held_out_files == ("00003.tokens",)
    assert (len(corpus.train), len(corpus.held_out)) == (43, 18)
    assert prepare(config(folder, held_out=0.3)).held_out_files == ("00002.tokens", "00003.tokens")
    assert len(prepare(config(folder, held_out=0.99)).train_files) == 1
    assert opened == []
    with pytest.raises(ValueError, match="holds token shards and no text; the tokenizer decodes them"):
        corpus.held_out_text()


def test_shards_to_hold_out_by_name(folder):
    corpus = prepare(config(folder, held_out_shards=["00001.tokens"], bad_shards="skip"))
    assert corpus.held_out_files == ("00001.tokens",)
    assert (corpus.train.bad_shards, corpus.held_out.bad_shards) == ("skip", "stop")
    with pytest.raises(ValueError, match=r"set has no shard 'x'"):
        prepare(config(folder, held_out_shards=["x"]))
    for names in ([], [f"{n:05d}.tokens" for n in range(4)]):
        with pytest.raises(ValueError, match="at least one must be held out and one be left"):
            prepare(config(folder, held_out_shards=names))


def test_another_folder_to_hold_out(folder, tmp_path):
    make_set(tmp_path / "other", [[4, 4]])
    corpus = prepare(config(folder, held_out_path=str(tmp_path / "other")))
    assert (len(corpus.train), len(corpus.held_out)) == (61, 8)
    with pytest.raises(ValueError, match="name two held-out parts: leave one out"):
        prepare(config(folder, held_out_path=str(tmp_path / "other"), held_out_shards=["00000.tokens"]))
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ValueError, match="is a folder of token shards: held_out_path must be one too, got"):
        prepare(config(folder, held_out_path=str(tmp_path / "t.txt")))


def rewrite_tokenizer(folder, made_by):
    change_index(folder, lambda index: index.update(tokenizer_hash=made_by))
    change_index(
        folder,
        lambda index: index.update(sha256=digest({k: index[k] for k in ("tokenizer_hash", "vocab_size", "shards")})),
    )


def test_the_tokenizer_is_that_of_the_shards(folder, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("some words and some other words " * 20)
    other = prepare(DataConfig(path=str(text), vocab_size=260, cache=str(tmp_path / "cache"))).folder
    with pytest.raises(ValueError, match="was made with another tokenizer than tokenizer="):
        prepare(config(folder, tokenizer=str(other)))
    make_set(tmp_path / "other", [[4, 4]])
    rewrite_tokenizer(tmp_path / "other", "b" * 64)
    with pytest.raises(ValueError, match=r"other was made with another tokenizer than .*set"):
        prepare(config(folder, held_out_path=str(tmp_path / "other")))
    rewrite_tokenizer(folder, "b" * 64)
    with pytest.raises(ValueError, match=r"was made with another tokenizer than its tokenizer\.json"):
        prepare(config(folder))


def test_names_of_shards_for_a_text(tmp_path):
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ValueError, match=r"held_out_shards=\['a'\] names token shards, and .* is no folder of them"):
        prepare(config(tmp_path / "t.txt", held_out_shards=["a"]))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_texts_become_shards(tmp_path, tokenizer):
    texts = {f"{n}.txt": f"document {n} " * (n + 1) for n in range(9)}
    (tmp_path / "texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text)
    chosen = load_tokenizer("bytes")
    if tokenizer == "bpe":
        small = DataConfig(path=str(tmp_path / "texts"), vocab_size=265, cache=str(tmp_path / "cache"))
        chosen = prepare(small).tokenizer
    said = []
    tokens = write_tokens(
        tmp_path / "out",
        [open_source(str(tmp_path / "texts")), str(tmp_path / "texts" / "0.txt")],
        chosen,
        shard_tokens=100,
        progress=lambda *state: said.append(state),
    )
    assert said[-1] == ("encoding", 10, 10)
    assert all(entry.tokens >= 100 for entry in tokens.entries[:-1])
    assert sum(entry.documents for entry in tokens.entries) == 10
    assert tokens.text_bytes == sum(map(len, texts.values())) + len(texts["0.txt"])
    starts = tokens.documents
    read = [chosen.decode(tokens.tokens[a:b].tolist(), skip_special_tokens=True) for a, b in pairwise(starts)]
    assert read == [*texts.values(), texts["0.txt"]]
    if tokenizer == "bpe":
        assert all(tokens.tokens[int(end) - 1 : int(end)] == 0 for end in starts[1:]), "each ends with the separator"
    assert prepare(config(tmp_path / "out", tokenizer="bpe")).tokenizer.to_str() == chosen.to_str()


def test_shards_that_cannot_be_made(tmp_path):
    source, chosen = open_source(str(tmp_path)), load_tokenizer("bytes")
    with pytest.raises(FileExistsError, match="exists already; choose another folder for the shards, or delete it"):
        write_tokens(tmp_path, [source], chosen, shard_tokens=1)
    with pytest.raises(ValueError, match="shard_tokens must be at least 1, got 0"):
        write_tokens(tmp_path / "out", [source], chosen, shard_tokens=0)
    with pytest.raises(ValueError, match=f"there is no text at all in {re.escape(repr(str(tmp_path)))}"):
        write_tokens(tmp_path / "out", [source], chosen, shard_tokens=1)
    broken = SimpleNamespace(asked="b", names=[], documents=lambda: iter([SimpleNamespace(text=b"a"), 1 / 1]))
    with pytest.raises(AttributeError):
        write_tokens(tmp_path / "out", [broken], chosen, shard_tokens=1)
    assert list(tmp_path.iterdir()) == [], "nothing is left of what failed"


def test_the_head_of_a_shard_is_where_tokens_begin(folder):
    assert (folder / "00000.tokens").read_bytes()[HEAD_BYTES : HEAD_BYTES + 8] == np.arange(2, dtype="<u4").tobytes()
