"""`subquad audit`: its table, its JSON, its exit status, and failing inputs tried again."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from subquad.cli.audit import run
from subquad.evaluation.audit.report import CHECKS
from subquad.hf import SubquadEncoderForSequenceClassification, SubquadForCausalLM
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.layers import positions
from tests.cli.folders import VOCABULARY, save_model

QUICK = ["--tokens", "8", "--contexts", "[]", "--long", "0"]
RIGHT = positions.Embedding.forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("audit") / "llp", options={"llp": {"segment": 4}})


def broken(monkeypatch):
    """From here on decoders depend on the length of the sequence."""
    wrong = lambda self, tokens, *more: RIGHT(self, tokens, *more) * (1 + tokens.shape[1])  # noqa: E731
    monkeypatch.setattr(positions.Embedding, "forward", wrong)


def failing(file):
    """The report in a file, and the failing input of its violation."""
    values = json.loads(file.read_text())
    checks = [check for report in values["reports"].values() for check in report["checks"] if check["failing"]]
    return values, checks[0]["failing"]


def test_a_folder_is_audited(folder, tmp_path, printed):
    file = tmp_path / "report.json"
    out = printed("audit", folder, *QUICK, "--json", file)
    assert all(name in out for name in CHECKS)
    assert "SubquadForCausalLM" in out
    assert out.rstrip().endswith("passed: no violation")
    (report,) = json.loads(file.read_text())["reports"].values()
    assert report["passed"]
    assert report["settings"]["tokens"] == 8
    assert printed("audit", folder, "--replay", file) == "the file has no failing inputs\n"


def test_a_violation_in_a_text_ends_with_status_1_and_can_be_tried_again(folder, tmp_path, refused, capsys):
    text, file = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("w3 w4 w5 w6 w3 w3")
    again = [str(folder), "--replay", str(file)]
    with pytest.MonkeyPatch.context() as changed:
        broken(changed)
        assert run([str(folder), *QUICK, "--text", str(text), "--json", str(file)]) == 1
        assert {token for row in failing(file)[1]["tokens"] for token in row} <= {3, 4, 5, 6}
        capsys.readouterr()
        assert run(again) == 1
        assert f"{folder}: truncation: still fails: " in capsys.readouterr().out
    assert run(again) == 0
    assert f"{folder}: truncation: no longer fails: " in capsys.readouterr().out
    values, case = failing(file)
    case["tokens"] = [[VOCABULARY] * len(case["tokens"][0])]
    file.write_text(json.dumps(values))
    assert "the model refuses the failing input of 'truncation'" in refused("audit", *again)


def test_on_a_terminal_it_is_a_table(folder, capsys, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    assert run([str(folder), *QUICK, "--tokens", "4"]) == 0
    shown = capsys.readouterr()
    assert "what was seen" in shown.out
    assert "cache, several tokens" in shown.out
    assert "causality" in shown.err  # the check at work


def test_several_mechanisms_are_audited_and_each_tried_again(folder, tmp_path, capsys, refused, monkeypatch):
    file = tmp_path / "report.json"
    arguments = ["--attention", "llp,linear", "--options.llp.segment", "4", *QUICK, "--tokens", "4"]
    assert run(arguments) == 0
    assert capsys.readouterr().out.endswith("2 of 2 passed\n")
    with monkeypatch.context() as changed:
        broken(changed)
        assert run([*arguments, "--json", str(file)]) == 1
        assert capsys.readouterr().out.count("failed: truncation\n") == 2
        assert run(["--attention", "linear", "--replay", str(file)]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("linear: truncation: still fails: ")
    values, case = failing(file)
    assert list(values["reports"]) == ["llp", "linear"]
    case["kind"] = "magic"  # in the report of llp, so it isn't read
    file.write_text(json.dumps(values))
    assert run(["--attention", "linear", "--replay", str(file)]) == 0
    assert "has no report of 'full', only of llp, linear" in refused("audit", "--attention", "full", "--replay", file)
    assert f"has no report of '{folder}'" in refused("audit", folder, "--replay", file)


NO_REPORT = {"a.json": "{}", "b.json": '{"reports": {}}'}
NO_REPORT |= {"c.json": '{"reports": {"a": 3}}', "d.json": '{"reports": {"a": {}}}'}


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "give either the folder of a model or --attention"),
    (["MODEL", "--attention", "llp"], "give either the folder of a model or --attention"),
    (["MODEL", "--options.llp.segment", "4"], "--options are for the models of --attention"),
    (["--attention", "llp", "--text", "x"], "--text needs the tokenizer"),
    (["MODEL", "--replay", "x", "--json", "y"], "--replay reads its inputs from a file: leave out --json and --text"),
    (["--attention", "llp,full", "--replay", "x"], "--replay is for one model"),
    (["--attention", "lpp"], "unknown attention 'lpp', or one without a causal form; did you mean 'llp'"),
    (["."], "there is no model in"),
    ([__file__], f"{__file__} is a file; give its folder, {Path(__file__).parent}"),
    (["runs/nowhere"], "there is no folder runs/nowhere; give the folder of a run"),
    (["MODEL", "--text", "nowhere"], "there is no file nowhere"),
    (["MODEL", *QUICK, "--text", ""], "there is no file "),
    (["MODEL", "--replay", ""], "there is no file "),
    (["MODEL", "--replay", "a.json"], "has no reports of `subquad audit --json`"),
    (["MODEL", "--replay", "b.json"], "has no reports"),
    (["MODEL", "--replay", "c.json"], "must be an object, got int"),
    (["MODEL", "--replay", "d.json"], "not a report of an audit"),
    *((["MODEL", "--json", file], "--json must name a file in a folder that exists")
      for file in ("nowhere/x.json", ".", "")),
])  # fmt: skip
def test_wrong_arguments_end_with_status_2(folder, tmp_path, refused, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, content in {"words": "w3 w9", **NO_REPORT}.items():
        (tmp_path / name).write_text(content)
    assert message in refused("audit", *(folder if argument == "MODEL" else argument for argument in arguments))


def test_models_that_cannot_be_audited_are_refused(folder, tmp_path, refused, capsys, monkeypatch):
    t5 = T5Config(vocab_size=19, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "holds an encoder-decoder (t5)" in refused("audit", tmp_path / "t5")
    config = SubquadClassifierConfig(dim=16, num_layers=1, num_heads=2, vocab_size=19, attention="full")
    SubquadEncoderForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    assert "holds no causal language model" in refused("audit", tmp_path / "classifier")
    bare = save_model(tmp_path / "bare", attention="full")
    (bare / "tokenizer.json").unlink()
    (tmp_path / "text").write_text("w3")
    assert "has no tokenizer.json for --text" in refused("audit", bare, "--text", tmp_path / "text")
    bert = BertConfig(vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    # transformers can build a language model from it, with a new head: what it computes sees later tokens.
    assert run([str(tmp_path / "bert"), *QUICK]) == 1
    assert "failed: causality" in capsys.readouterr().out
    monkeypatch.setattr(SubquadForCausalLM, "forward", lambda self, input_ids: 1 / 0)
    assert "the model takes no sequence of 2, 3" in refused("audit", folder, *QUICK)
