"""`subquad generate --texts`: many texts to a file that training reads."""

import zipfile

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.cli import main
from subquad.data import DataConfig, prepare
from subquad.hf import SubquadConfig, SubquadForCausalLM

WORDS = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(9))])}


def save(folder, vocabulary=WORDS, **changes):
    torch.manual_seed(0)
    shape = {"vocab_size": len(WORDS), "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full", "init_std": 0.5}
    SubquadForCausalLM(SubquadConfig(**{**shape, **changes})).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([name for name in ("<s>", "</s>") if name in vocabulary])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), bos_token_id=1)


def texts(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_each_text_is_a_document_and_the_same_seed_gives_the_same_file(run, tmp_path, capsys):
    command = ["generate", str(run), "--texts", "70", "--max_tokens", "12", "--seed", "3"]
    for name in ("one.zip", "two.zip"):
        assert main([*command, "--out-file", str(tmp_path / name)]) == 0
    err = capsys.readouterr().err
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    found = texts(tmp_path / "one.zip")
    assert f"{len(found)} texts of {sum(map(len, found.values())):,} bytes in {tmp_path}/one.zip" in err
    empty = 70 - len(found)
    assert empty > 0
    assert f"({empty} were empty and are left out)" in err
    assert all(WORDS.get(word, 1) not in (1, 2) for text in found.values() for word in text.split())
    assert any(len(text.split()) < 11 for text in found.values()), "a text ends where another would begin"
    config = DataConfig(path=str(tmp_path / "one.zip"), tokenizer=str(run), cache=str(tmp_path / "cache"), held_out=0.3)
    corpus = prepare(config)
    assert len(corpus.files) == len(found)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_text_is_the_sample_of_its_seed(run, tmp_path, capsys):
    file = str(tmp_path / "texts.zip")
    sampling = ["--max_tokens", "6", "--seed", "5"]
    assert main(["generate", str(run), "--prompt", "w1 w2", "--texts", "3", "--out-file", file, *sampling]) == 0
    capsys.readouterr()
    for number, text in texts(file).items():
        seed = str(5 + int(number.removesuffix(".txt")) - 1)
        assert main(["generate", str(run), "--prompt", "w1 w2", "--max_tokens", "6", "--seed", seed]) == 0
        sample = capsys.readouterr().out.split()
        assert text.split() == sample[: len(text.split())]


def test_a_model_without_a_start_begins_after_the_separator_or_needs_a_prompt(tmp_path, capsys):
    after = save(tmp_path / "after")
    assert main(["generate", str(after), "--texts", "2", "--out-file", str(tmp_path / "texts.zip"), "--seed", "0"]) == 0
    bare = save(tmp_path / "bare", {f"w{i}": i for i in range(len(WORDS))} | {"<unk>": 0})
    with pytest.raises(SystemExit):
        main(["generate", str(bare), "--texts", "2", "--out-file", str(tmp_path / "texts.zip")])
    assert "names no token that begins a text (bos_token_id); give a --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--texts", "2"], "--texts N and --out-file FILE go together, got --texts alone"),
        (["--out-file", "a.zip"], "--texts N and --out-file FILE go together, got --out-file alone"),
        (["--texts", "0", "--out-file", "a.zip"], "texts must be at least 1, got 0"),
        (["--texts", "2", "--out-file", "a.txt"], "--out-file must end with .zip: each text is a document in it"),
        (["--texts", "2", "--out-file", "nowhere/a.zip"], "nowhere for --out-file"),
        (["--texts", "2", "--out-file", "a.zip", "--samples", "2"], "--samples does not go with --texts; leave it out"),
        (["--texts", "2", "--out-file", "a.zip", "--stop", "w1"], "--stop does not go with --texts; leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(run, tmp_path, monkeypatch, capsys, arguments, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", str(run), *arguments])
    assert exit_info.value.code == 2
    assert match in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
