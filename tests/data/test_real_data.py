"""Public data sets as they are; all but one of these tests are slow."""

import hashlib
import lzma
import tarfile

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from subquad.data import DataConfig, load_images, load_tokenizer, prepare
from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.tokenizers import Encoder, encode_text, separator_id
from subquad.data.windows import Windows


@pytest.fixture(scope="module")
def shakespeare(data_folder):
    return data_folder / "tinyshakespeare" / "input.txt.xz"


def test_tinyshakespeare_is_split_as_is_usual(shakespeare, tmp_path):
    corpus = prepare(DataConfig(path=str(shakespeare), held_out=0.1, tokenizer="bytes", cache=str(tmp_path)))
    text = lzma.decompress(shakespeare.read_bytes())
    assert (len(text), len(corpus.train)) == (1_115_394, 1_003_854)
    assert corpus.held_out_text() == text[1_003_854:]
    assert corpus.held_out.words == len(text[1_003_854:].split())
    assert len(Windows(corpus.train, 1024)) == 981


@pytest.mark.slow
def test_tinyshakespeare_as_characters_bpe_and_wordpiece(shakespeare, tmp_path):
    config = DataConfig(path=str(shakespeare), held_out=0.1, vocab_size=512, cache=str(tmp_path))
    characters = prepare(config.replace(tokenizer="characters"))
    assert (characters.train.vocab_size, len(characters.train)) == (65, 1_003_854)
    assert characters.tokenizer.decode(characters.train.tokens[:13].tolist()) == "First Citizen"
    bpe = prepare(config)
    assert bpe.tokenizer.decode(bpe.held_out.tokens.tolist()).encode() == bpe.held_out_text()
    assert len(bpe.held_out) < 0.6 * bpe.held_out.text_bytes
    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=800, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    wordpiece.train_from_iterator([lzma.decompress(shakespeare.read_bytes())[:200_000].decode()], trainer)
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(config.replace(tokenizer=str(tmp_path / "tokenizer.json")))
    assert corpus.train.vocab_size == wordpiece.get_vocab_size()
    assert corpus.held_out.tokens.tolist() == wordpiece.encode(corpus.held_out_text().decode()).ids
    assert corpus.held_out.text_bytes == len(corpus.held_out_text())


@pytest.mark.slow
def test_gpt2s_own_files(data_folder, shakespeare):
    tokenizer = load_tokenizer(data_folder / "gpt2_bpe")
    assert (tokenizer.get_vocab_size(), separator_id(tokenizer)) == (50_257, 50_256)
    assert encode_text(tokenizer, "Hello world") == [15496, 995]
    text = lzma.decompress(shakespeare.read_bytes())[:50_000]
    ids = np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text])])
    assert tokenizer.decode(ids.tolist()).encode() == text


@pytest.mark.slow
def test_books_from_the_archive_and_from_a_folder_are_the_same(data_folder, tmp_path):
    chosen = {"gutenberg/valid/158_Emma.txt", "gutenberg/train/1342_Pride-and-Prejudice.txt"}
    with tarfile.open(data_folder / "gutenberg" / "gutenberg.tar.xz") as books:
        books.extractall(tmp_path, members=[m for m in books if m.name in chosen], filter="data")
    train, held_out, packed = tmp_path / "gutenberg/train", tmp_path / "gutenberg/valid", tmp_path / "two.tar.gz"
    with tarfile.open(packed, "w:gz") as two:
        two.add(train, "t")
        two.add(held_out, "v")
    config = DataConfig(path=str(train), held_out_path=str(held_out), tokenizer="bytes", cache=str(tmp_path / "cache"))
    corpus, both = prepare(config), prepare(config.replace(path=str(packed), held_out_path=None))
    assert corpus.files == ("1342_Pride-and-Prejudice.txt", "158_Emma.txt")
    assert len(corpus.train) == 691_843
    emma = "b1f407ebf45d923e2c2532a1000ce2ee7b4eb5008b63fa9898522b16c70c9c00"
    assert hashlib.sha256(corpus.held_out_text()).hexdigest() == emma
    assert {bytes(both.train.tokens), bytes(both.held_out.tokens)} == {
        bytes(corpus.train.tokens),
        bytes(corpus.held_out.tokens),
    }


@pytest.mark.slow
def test_the_standard_library_as_bytes(tmp_path):
    corpus = prepare(DataConfig(path="stdlib", tokenizer="bytes", cache=str(tmp_path)))
    assert corpus.held_out.text_bytes == len(corpus.held_out_text())
    assert 0.01 < corpus.held_out.text_bytes / (corpus.train.text_bytes + corpus.held_out.text_bytes) < 0.15
    assert all(name.endswith(".py") for name in corpus.files)


@pytest.mark.slow
def test_mnist_and_cifar(data_folder):
    mnist = load_images(str(data_folder / "mnist"), labels=True)
    assert mnist["train"].pixels.shape == (60000, 28, 28, 1)
    assert np.bincount(mnist["test"].labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    cifar = load_images(str(data_folder / "cifar10" / "cifar10_jpeg_q75.npz.xz"), labels=True)
    assert cifar["train"].pixels.shape == (50000, 32, 32, 3)
    assert set(np.bincount(cifar["test"].labels).tolist()) == {1000}


def labelled(path, cache, dataset, length):
    corpus = labelled_corpus(LabelledConfig(dataset=dataset, path=str(path), cache=str(cache)), length)
    return corpus, [len(corpus.train), len(corpus.held_out), len(corpus.test)]


@pytest.mark.slow
def test_reviews(data_folder, tmp_path):
    corpus, (train, held_out, test) = labelled(data_folder / "imdb", tmp_path, "text", 4000)
    assert train + held_out == test == 25_000
    assert np.bincount(corpus.test.labels).tolist() == [12_500, 12_500]
    assert 2300 < held_out < 2700
    assert int(np.median(corpus.test.full_lengths)) == 963
    assert corpus.test.full_lengths.max() == 12_988


@pytest.mark.slow
def test_pairs_of_papers(data_folder, tmp_path):
    corpus, sizes = labelled(data_folder / "acl_pairs", tmp_path, "retrieval", 4000)
    assert sizes == [4152, 548, 836]
    for part in (corpus.train, corpus.held_out, corpus.test):
        assert part.labels.mean() == 0.5
        assert part.full_lengths.min() >= 2000


@pytest.mark.slow
def test_grey_pictures_and_digits(data_folder, tmp_path):
    (file,) = (data_folder / "cifar10").glob("*.npz*")
    corpus, sizes = labelled(file, tmp_path, "image", 1024)
    assert sizes == [45_000, 5_000, 10_000]
    assert set(np.bincount(corpus.held_out.labels)) == {500}
    mean = corpus.train.shard.tokens.mean() / 255
    assert abs(mean - (0.299 * 0.4914 + 0.587 * 0.4822 + 0.114 * 0.4465)) < 0.002  # the known means
    corpus, sizes = labelled(data_folder / "mnist", tmp_path, "image", 784)
    assert sizes == [54_000, 6_000, 10_000]
    counts = np.bincount(corpus.train.labels) + np.bincount(corpus.held_out.labels)
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
