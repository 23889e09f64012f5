import hashlib
import lzma
import tarfile

import pytest
from tokenizers import Tokenizer, models

from subquad.data import DataConfig, prepare
from subquad.data.windows import Windows


@pytest.fixture(scope="module")
def shakespeare(data_folder):
    return data_folder / "tinyshakespeare" / "input.txt.xz"


def test_tinyshakespeare_is_split_as_is_usual(shakespeare, tmp_path):
    corpus = prepare(DataConfig(path=str(shakespeare), held_out=0.1, tokenizer="bytes", cache=str(tmp_path)))
    text = lzma.decompress(shakespeare.read_bytes())
    assert len(text) == 1_115_394
    assert len(corpus.train) == 1_003_854
    assert corpus.held_out_text() == text[1_003_854:]
    assert corpus.held_out.words == len(text[1_003_854:].split())
    assert len(Windows(corpus.train, 1024)) == 981


def test_tinyshakespeare_as_bpe_is_read_back(shakespeare, tmp_path):
    corpus = prepare(DataConfig(path=str(shakespeare.parent / "*.xz"), vocab_size=512, cache=str(tmp_path)))
    assert corpus.tokenizer.decode(corpus.held_out.tokens.tolist()).encode() == corpus.held_out_text()
    assert len(corpus.held_out) < 0.6 * corpus.held_out.text_bytes


def test_books_from_the_archive_and_from_a_folder_are_the_same(data_folder, tmp_path):
    archive = data_folder / "gutenberg" / "gutenberg.tar.xz"
    chosen = {"gutenberg/valid/158_Emma.txt", "gutenberg/train/1342_Pride-and-Prejudice.txt"}
    with tarfile.open(archive) as books:
        books.extractall(tmp_path, members=[m for m in books if m.name in chosen], filter="data")
    config = DataConfig(
        path=str(tmp_path / "gutenberg/train"),
        held_out_path=str(tmp_path / "gutenberg/valid"),
        tokenizer="bytes",
        cache=str(tmp_path / "cache"),
    )
    corpus = prepare(config)
    assert corpus.files == ("1342_Pride-and-Prejudice.txt", "158_Emma.txt")
    assert len(corpus.train) == 691_843
    emma = "b1f407ebf45d923e2c2532a1000ce2ee7b4eb5008b63fa9898522b16c70c9c00"
    assert hashlib.sha256(corpus.held_out_text()).hexdigest() == emma
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as two:
        two.add(tmp_path / "gutenberg/train", "t")
        two.add(tmp_path / "gutenberg/valid", "v")
    packed = prepare(config.replace(path=str(tmp_path / "two.tar.gz"), held_out_path=None))
    assert len(packed.files) == 2
    assert {hashlib.sha256(part.tokens.tobytes()).digest() for part in (packed.train, packed.held_out)} == {
        hashlib.sha256(part.tokens.tobytes()).digest() for part in (corpus.train, corpus.held_out)
    }


def test_the_standard_library_as_bytes(tmp_path):
    corpus = prepare(DataConfig(path="stdlib", tokenizer="bytes", cache=str(tmp_path)))
    assert corpus.held_out.text_bytes == len(corpus.held_out_text())
    assert 0.01 < corpus.held_out.text_bytes / (corpus.train.text_bytes + corpus.held_out.text_bytes) < 0.15
    assert all(name.endswith(".py") for name in corpus.files)


def test_a_wordpiece_tokenizer_trained_elsewhere(shakespeare, tmp_path):
    from tokenizers import normalizers, pre_tokenizers, trainers

    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = lzma.decompress(shakespeare.read_bytes())[:200_000].decode()
    special = ["[UNK]", "[SEP]"]
    wordpiece.train_from_iterator(
        [text], trainers.WordPieceTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    )
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(DataConfig(path=str(shakespeare), tokenizer=str(tmp_path / "tokenizer.json"), cache=str(tmp_path)))
    assert corpus.train.vocab_size == wordpiece.get_vocab_size()
    assert corpus.held_out.tokens.tolist() == wordpiece.encode(corpus.held_out_text().decode()).ids
    assert corpus.held_out.text_bytes == len(corpus.held_out_text())
