import pytest

from subquad.data import DataConfig


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_the_held_out_fraction_lies_between_its_bounds(fraction):
    with pytest.raises(ValueError, match=r"held_out must lie between 0 and 1, both excluded, got"):
        DataConfig(held_out=fraction)


def test_a_bpe_holds_all_bytes_and_the_separator():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257 for tokenizer='bpe'.*got 256"):
        DataConfig(vocab_size=256)
    assert DataConfig(vocab_size=257).vocab_size == 257
    assert DataConfig(tokenizer="bytes", vocab_size=256).tokenizer == "bytes"


def test_a_path_is_not_empty():
    with pytest.raises(ValueError, match="path must name a file, a folder, a glob, 'stdlib' or 'hf:NAME'"):
        DataConfig(path="")


def test_a_file_keeps_the_configuration(tmp_path):
    config = DataConfig(path="books/*.txt", held_out=0.1, tokenizer="bytes", cache="there")
    config.to_file(tmp_path / "data.yaml")
    assert DataConfig.from_file(tmp_path / "data.yaml") == config
