"""`subquad data tokens` and `subquad data check`."""

import json

import pytest

from subquad.cli import main
from subquad.data import TokenSet
from subquad.data.token_set import held_out_names
from tests.data.sets import flip


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts").mkdir()
    for n in range(9):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"document {n} " * (n + 1))
    return tmp_path / "texts"


def test_a_folder_is_made_and_checked(texts, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["data", "tokens", str(texts), str(texts / "0.txt"), "--out", str(out), "--shard_tokens", "100"]
    assert main([*arguments, "--json", str(tmp_path / "j.json")]) == 0
    said = capsys.readouterr().out
    tokens = TokenSet(out)
    assert f"{len(tokens):,} tokens of 10 documents in 4 shards, 256 in the vocabulary" in said
    assert "00003.tokens" in said
    record = json.loads((tmp_path / "j.json").read_text())
    assert (record["tokens"], record["shards"], record["documents"]) == (len(tokens), 4, 10)
    assert record["fingerprint"] == tokens.fingerprint
    assert main(["data", "check", str(out)]) == 0
    assert f"4 of 4 shards of {out} are whole" in capsys.readouterr().out
    flip(out / "00002.tokens")
    (out / "00003.tokens").unlink()
    assert main(["data", "check", str(out)]) == 1
    said = capsys.readouterr().out
    assert "shard 00002.tokens of" in said
    assert "shard 00003.tokens of" in said
    assert "2 of 4 shards" in said
    assert main(arguments) == 1
    assert "exists already; choose another folder" in capsys.readouterr().err


def test_a_run_on_shards_is_measured_with_its_boundaries(texts, tmp_path, capsys):
    assert main(["data", "tokens", str(texts), "--out", str(tmp_path / "out"), "--shard_tokens", "100"]) == 0
    run = tmp_path / "run"
    options = {
        "data.path": tmp_path / "out",
        "data.pack": "documents",
        "data.held_out": 0.5,
        "data.cache": tmp_path / "cache",
        "model.dim": 16,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "batch.length": 32,
        "batch.size": 2,
        "schedule.warmup": 1,
        "run.steps": 2,
        "run.eval_every": 0,
        "run.folder": run,
        "run.sample_tokens": 2,
    }
    assert main(["train", *(f"--{name}={value}" for name, value in options.items())]) == 0
    assert "keeps no text to compress beside the model: no report.json" in capsys.readouterr().out
    assert not (run / "report.json").exists()
    result = tmp_path / "result.json"
    found = {}
    for documents in ("null", "false"):
        assert main(["eval", str(run), "--documents", documents, "--json", str(result)]) == 0
        found[documents] = json.loads(result.read_text())
    before = json.loads((run / "evaluation.json").read_text())
    assert before["loss"] == found["null"]["loss"] != found["false"]["loss"]
    entries = TokenSet(tmp_path / "out").entries
    held_out = [entry for entry in entries if entry.name in held_out_names(entries, 0.5)]
    tokens, documents = (sum(getattr(entry, what) for entry in held_out) for what in ("tokens", "documents"))
    assert documents > 1
    assert found["null"]["tokens"] == tokens - documents
    assert found["false"]["tokens"] == tokens - 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokenizer", "bpe"], "tokenizer 'bpe' is trained on a whole text"),
        (["--tokenizer", "nowhere"], "unknown tokenizer 'nowhere'"),
        (["--shard_tokens", "0"], "shard_tokens must be at least 1, got 0"),
        (["--shard_token", "9"], "unknown option 'shard_token'; did you mean 'shard_tokens'?"),
    ],
)
def test_wrong_arguments_are_refused(texts, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "tokens", str(texts), "--out", str(tmp_path / "out"), *more])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_set_to_check(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["data", "check", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "holds no index.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tokens", "check"])
def test_the_help_of_each(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["data", command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: subquad data {command}" in capsys.readouterr().out
