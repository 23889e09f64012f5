"""`subquad train`: files, tables, samples, interruptions and failures of a whole run."""

import json
import re

import pytest
import yaml
from safetensors.torch import load_file

from subquad.cli import main
from subquad.data import TokenSet
from subquad.data.token_set import held_out_names
from subquad.program import command
from subquad.training import TrainConfig
from tests.training.helpers import stop_at_once


def test_train_writes_all_that_it_reports_and_reports_a_finished_run_again(trained):
    def read(name):
        return json.loads((trained / f"{name}.json").read_text())

    report, evaluation = read("report"), read("evaluation")
    assert report["bits_per_byte"] == evaluation["bits_per_byte"]
    assert all(0 < report["baselines"][f"{name}_bits_per_byte"] < 8 for name in ("gzip", "ngram", "bzip2_after"))
    assert evaluation["text_bytes"] == evaluation["tokens"] + 1  # bytes are the tokens
    samples = (trained / "samples.txt").read_text()
    assert samples.count("--- ") == samples.count("a text é line 115 of") == 3
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "tokenizer.json"):
        assert (trained / name).stat().st_size > 0
    assert main(["train", "--config", str(trained / "config.yaml")]) == 0
    assert read("report")["train_tokens_per_second"] > 0
    assert read("report")["bits_per_byte"] == report["bits_per_byte"]


@pytest.mark.draws
def test_the_folder_of_a_run_repeats_it_with_tables_and_curves(trained, tmp_path, printed):
    out = printed("train", "--config", trained / "config.yaml", "--run.folder", tmp_path)
    for part in (
        "gzip -9 alone",
        "xz -9e after the same text",
        "-grams of bytes",
        "bits per byte",
        "state after 4,000 tokens",
        "tokens/s",
        "whitespace word",
    ):
        assert part in out
    assert "--- greedy\na text é line 115 of" in out
    assert (tmp_path / "curves.png").stat().st_size > 0
    one, two = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path))
    assert all(one[name].equal(two[name]) for name in one)


def test_the_end_of_a_short_run_measures_no_more_than_it_trained_on(tiny, tmp_path, caplog, printed):
    run = tmp_path / "short run"
    printed("train", "--config", tiny, "--run.folder", run, "--run.steps", "2")
    evaluation, report = (json.loads((run / f"{name}.json").read_text()) for name in ("evaluation", "report"))
    assert evaluation["tokens"] == report["held_out_bytes"] - 1 == 2 * 2 * 32
    assert f"on all held-out text: {command('eval', run)}" in caplog.text
    assert "samples are cut to 1 tokens: the run has only 2 steps" in caplog.text
    printed("eval", run, "--windows", "4", "--json", tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == evaluation["loss"]


def test_an_interrupted_run_says_how_to_resume(tiny, tmp_path, capsys, refused, monkeypatch):
    folder, kept = tmp_path / "stopped run", []
    with monkeypatch.context() as stopped:
        stopped.setattr("subquad.memory.keep_freed_memory", lambda: kept.append(True))
        stopped.setattr("subquad.cli.threads.free_threads", lambda: 1)
        stop_at_once(stopped)
        assert main(["train", "--config", str(tiny), "--run.folder", str(folder)]) == 130
    assert kept == [True]
    assert TrainConfig.from_file(folder / "config.yaml").run.threads == 1
    said = f"stopped after step 1 of 3; resume with:\n  {command('train', '--config', folder / 'config.yaml')}\n"
    assert said in capsys.readouterr().err
    assert "its training has not ended" in refused("generate", folder, "--prompt", "x")
    assert main(["train", "--config", str(folder / "config.yaml")]) == 0
    assert json.loads((folder / "report.json").read_text())["steps"] == 3


def failed(capsys, *arguments):
    """The last line of a command that ends with status 1."""
    assert main(["train", *map(str, arguments)]) == 1
    err = capsys.readouterr().err
    assert ("Traceback" in err) == ("--debug" in arguments)
    return err.splitlines()[-1]


@pytest.mark.parametrize(("content", "match", "debug"), [
    (b"", "is empty: there is no text to read", []),
    (b"text\xff", "is not text: byte 4 is 0xff, which is not valid UTF-8", ["--debug"]),
])  # fmt: skip
def test_bad_text_is_a_failure_of_one_line(capsys, tmp_path, content, match, debug):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    folders = ["--data.cache", tmp_path, "--run.folder", tmp_path / "run"]
    assert failed(capsys, "--data.path", bad, *folders, *debug).startswith(f"error: {bad} {match}")


def test_a_loss_that_is_not_finite_is_a_failure_of_one_line(capsys, tiny, tmp_path):
    options = ["--optimizer.lr", "1e30", "--run.steps", "9", "--run.folder", tmp_path / "diverged"]
    message = failed(capsys, "--config", tiny, *options)
    assert re.match(r"error: the (loss|gradient norm) is (nan|inf) at step \d", message)


def test_a_run_on_shards_is_measured_with_its_boundaries(tiny, tmp_path, printed):
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(6):
        (texts / f"{n}.txt").write_text(f"document {n} " * (n + 1))
    printed("data", "tokens", texts, "--out", tmp_path / "out", "--shard_tokens", "100")
    data = {"path": str(tmp_path / "out"), "pack": "documents", "held_out": 0.5, "cache": str(tmp_path / "cache")}
    values = yaml.safe_load(tiny.read_text()) | {"data": data}
    (tmp_path / "shards.yaml").write_text(yaml.safe_dump(values))
    run, found = tmp_path / "run", {}
    out = printed("train", "--config", tmp_path / "shards.yaml", "--run.folder", run, "--run.eval_every", "0")
    assert "No report.json: token shards don't keep the text" in " ".join(out.split())
    assert not (run / "report.json").exists()
    for documents in ("null", "false"):
        printed("eval", run, "--documents", documents, "--json", tmp_path / "result.json")
        found[documents] = json.loads((tmp_path / "result.json").read_text())
    before = json.loads((run / "evaluation.json").read_text())
    assert before["loss"] == found["null"]["loss"] != found["false"]["loss"]
    entries = TokenSet(tmp_path / "out").entries
    held_out = [entry for entry in entries if entry.name in held_out_names(entries, 0.5)]
    tokens, documents = (sum(getattr(entry, what) for entry in held_out) for what in ("tokens", "documents"))
    assert documents > 1
    assert (found["null"]["tokens"], found["false"]["tokens"]) == (tokens - documents, tokens - 1)
