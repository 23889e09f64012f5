"""Public data sets as they are; all but one of these tests are slow."""

import lzma

import numpy as np
import pytest

from subquad.data import DataConfig, load_tokenizer, prepare
from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import Encoder, encode_text
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
def test_tinyshakespeare_as_characters_and_bpe(shakespeare, tmp_path):
    config = DataConfig(path=str(shakespeare), held_out=0.1, vocab_size=512, cache=str(tmp_path))
    characters = prepare(config.replace(tokenizer="characters"))
    assert (characters.train.vocab_size, len(characters.train)) == (65, 1_003_854)
    assert characters.tokenizer.decode(characters.train.tokens[:13].tolist()) == "First Citizen"
    bpe = prepare(config)
    assert bpe.tokenizer.decode(bpe.held_out.tokens.tolist()).encode() == bpe.held_out_text()
    assert len(bpe.held_out) < 0.6 * bpe.held_out.text_bytes


@pytest.mark.slow
def test_gpt2s_own_files(data_folder, shakespeare):
    tokenizer = load_tokenizer(data_folder / "gpt2_bpe")
    assert (tokenizer.get_vocab_size(), separator_id(tokenizer)) == (50_257, 50_256)
    assert encode_text(tokenizer, "Hello world") == [15496, 995]
    text = lzma.decompress(shakespeare.read_bytes())[:50_000]
    ids = np.concatenate([ids for _, ids in Encoder(tokenizer).encode([text])])
    assert tokenizer.decode(ids.tolist()).encode() == text


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "path", "length", "sizes", "longest", "counts"), [
    ("text", "imdb", 4000, None, 12_988, [12_500, 12_500]),
    ("retrieval", "acl_pairs", 4000, [4152, 548, 836], None, [418, 418]),
    ("image", "cifar10/cifar10_jpeg_q75.npz.xz", 1024, [45_000, 5_000, 10_000], 1024, [1000] * 10),
    ("image", "mnist", 784, [54_000, 6_000, 10_000], 784, [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
])  # fmt: skip
def test_labelled_data_sets(data_folder, tmp_path, dataset, path, length, sizes, longest, counts):
    corpus = labelled_corpus(LabelledConfig(dataset=dataset, path=str(data_folder / path), cache=str(tmp_path)), length)
    found = [len(part) for part in (corpus.train, corpus.held_out, corpus.test)]
    assert found == sizes or (sizes is None and found[0] + found[1] == 25_000 and 2300 < found[1] < 2700)
    assert np.bincount(corpus.test.labels).tolist() == counts
    assert longest is None or corpus.test.full_lengths.max() == longest
    shares = np.bincount(corpus.held_out.labels) / np.bincount(corpus.train.labels)
    assert dataset == "text" or np.ptp(shares) < 0.002, "each class in its share"
    if counts == [1000] * 10:  # the known means of the colours
        mean = corpus.train.shard.tokens.mean() / 255
        assert abs(mean - (0.299 * 0.4914 + 0.587 * 0.4822 + 0.114 * 0.4465)) < 0.002
