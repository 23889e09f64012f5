"""`subquad audit`: its table, its JSON, its exit status, and inputs tried again."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from subquad.cli.audit import run
from subquad.evaluation.audit.report import CHECKS
from subquad.hf import SubquadConfig, SubquadForCausalLM, SubquadForSequenceClassification
from subquad.hf.encoders import SubquadClassifierConfig

VOCABULARY = 23
SHAPE = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 1, "num_heads": 2}
QUICK = ["--tokens", "8", "--contexts", "[]", "--long", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "llp"
    torch.manual_seed(0)
    SubquadForCausalLM(SubquadConfig(**SHAPE, attention="llp", options={"llp": {"segment": 4}})).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def broken(monkeypatch):
    """From here on our decoders depend on the length of the sequence."""
    from subquad.layers import positions

    right = positions.Embedding.forward
    monkeypatch.setattr(
        positions.Embedding, "forward", lambda self, tokens, *args: right(self, tokens, *args) * (1 + tokens.shape[1])
    )


def test_a_folder_is_audited(folder, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert run([str(folder), *QUICK, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CHECKS)
    assert "SubquadForCausalLM" in out
    assert out.rstrip().endswith("passed: no violation")
    (report,) = json.loads(file.read_text())["reports"].values()
    assert report["passed"]
    assert report["settings"]["tokens"] == 8
    assert run([str(folder), "--replay", str(file)]) == 0
    assert capsys.readouterr().out == "the file holds no failing input\n"


def test_a_violation_ends_with_status_1_and_can_be_tried_again(folder, tmp_path, capsys, monkeypatch):
    file = tmp_path / "report.json"
    with monkeypatch.context() as changed:
        broken(changed)
        assert run([str(folder), *QUICK, "--json", str(file)]) == 1
        assert "failed: truncation\n" in capsys.readouterr().out
        assert run([str(folder), "--replay", str(file)]) == 1
        assert f"{folder}: truncation: still fails: " in capsys.readouterr().out
    assert run([str(folder), "--replay", str(file)]) == 0
    assert f"{folder}: truncation: no longer fails: " in capsys.readouterr().out


def test_mechanisms_are_audited_without_a_folder(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["--attention", "llp,linear", "--options.llp.segment", "4", *QUICK, "--json", str(file)]
    assert run(arguments) == 0
    assert capsys.readouterr().out.endswith("2 of 2 passed\n")
    assert list(json.loads(file.read_text())["reports"]) == ["llp", "linear"]


def test_a_text_is_read(folder, tmp_path, capsys, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("w3 w4 w5 w6 w3 w3")
    file = tmp_path / "report.json"
    broken(monkeypatch)
    assert run([str(folder), *QUICK, "--text", str(text), "--json", str(file)]) == 1
    (report,) = json.loads(file.read_text())["reports"].values()
    (check,) = [check for check in report["checks"] if check["failing"]]
    assert {token for row in check["failing"]["tokens"] for token in row} <= {3, 4, 5, 6}


def test_on_a_terminal_it_is_a_table(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    assert run([str(folder), *QUICK]) == 0
    shown = capsys.readouterr()
    assert "what was seen" in shown.out
    assert "cache, several tokens" in shown.out
    assert "causality" in shown.err  # the check at work


def refused(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        run([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_wrong_arguments_end_with_status_2(folder, tmp_path, capsys):
    assert "give the folder of a model, or --attention" in refused(capsys, [])
    assert "give the folder of a model, or --attention" in refused(capsys, [folder, "--attention", "llp"])
    assert "--options are for the models of --attention" in refused(capsys, [folder, "--options.llp.segment", "4"])
    assert "--text needs the tokenizer" in refused(capsys, ["--attention", "llp", "--text", "x"])
    assert "--replay tries the inputs of a file again" in refused(capsys, [folder, "--replay", "x", "--json", "y"])
    assert "--replay is for one model" in refused(capsys, ["--attention", "llp,full", "--replay", "x"])
    assert "unknown attention 'lpp'" in refused(capsys, ["--attention", "lpp"])
    assert "did you mean 'llp'" in refused(capsys, ["--attention", "lpp"])
    assert "without a causal form" in refused(capsys, ["--attention", "linformer"])
    assert "tokens must be at least 4, got 1" in refused(capsys, [folder, "--tokens", "1"])
    assert "there is no model in" in refused(capsys, [tmp_path])
    assert "there is no folder runs/nowhere; give that of a run" in refused(capsys, ["runs/nowhere"])
    text = tmp_path / "text.txt"
    assert f"there is no file {text}" in refused(capsys, [folder, "--text", text])
    text.write_text("{}")
    assert "holds no reports of `subquad audit --json`" in refused(capsys, [folder, "--replay", text])
    text.write_text('{"reports": {"a": {}}}')
    assert "no report of an audit" in refused(capsys, [folder, "--replay", text])


def test_status_1_is_for_violations_alone(folder, tmp_path, capsys, monkeypatch):
    text, file = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("")
    assert "text must hold at least one token" in refused(capsys, [folder, *QUICK, "--text", text])
    assert "there is no file " in refused(capsys, [folder, *QUICK, "--text", ""])
    text.write_text("w3 w9")
    few = [folder, *QUICK, "--vocab_size", "4", "--text", text]
    assert "text must hold tokens between 0 and 3, got 3 to 9" in refused(capsys, few)
    for place in (tmp_path / "nowhere" / "x.json", tmp_path, ""):  # before any work
        with monkeypatch.context() as changed:
            changed.setattr("subquad.cli.audit.audit", None)
            assert "--json must name a file in a folder that exists" in refused(capsys, [folder, "--json", place])
    with monkeypatch.context() as changed:
        changed.setattr(SubquadForCausalLM, "forward", lambda self, input_ids: 1 / 0)
        assert "the model takes no sequence of 2, 3" in refused(capsys, [folder, *QUICK])
    with monkeypatch.context() as changed:
        broken(changed)
        assert run([str(folder), *QUICK, "--json", str(file)]) == 1
    values = json.loads(file.read_text())
    (check,) = [check for check in values["reports"][str(folder)]["checks"] if check["failing"]]
    check["failing"]["tokens"] = [[VOCABULARY] * len(check["failing"]["tokens"][0])]
    file.write_text(json.dumps(values))
    assert "does not take the failing input of 'truncation'" in refused(capsys, [folder, "--replay", file])
    check["failing"]["tokens"] = []
    file.write_text(json.dumps(values))
    assert "no failing input of an audit: tokens must hold" in refused(capsys, [folder, "--replay", file])
    assert "there is no file " in refused(capsys, [folder, "--replay", ""])


def test_of_several_reports_that_of_the_model_is_tried(folder, tmp_path, capsys, monkeypatch):
    file = tmp_path / "report.json"
    with monkeypatch.context() as changed:
        broken(changed)
        assert run(["--attention", "llp,linear", "--options.llp.segment", "4", *QUICK, "--json", str(file)]) == 1
        capsys.readouterr()
        assert run(["--attention", "linear", "--replay", str(file)]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("linear: truncation: still fails: ")
    values = json.loads(file.read_text())
    (check,) = [check for check in values["reports"]["llp"]["checks"] if check["failing"]]
    check["failing"] = {"kind": "magic"}  # of another model, so not even read
    file.write_text(json.dumps(values))
    assert run(["--attention", "linear", "--replay", str(file)]) == 0
    for model in (["--attention", "full"], [folder]):
        assert "holds no report of '" in refused(capsys, [*model, "--replay", file])
    assert "it has llp, linear" in refused(capsys, ["--attention", "full", "--replay", file])
    file.write_text('{"reports": {}}')
    assert "holds no reports" in refused(capsys, [folder, "--replay", file])
    file.write_text('{"reports": {"a": 3}}')
    assert "must be an object, got int" in refused(capsys, [folder, "--replay", file])


def test_other_models_are_refused(folder, tmp_path, capsys):
    t5 = T5Config(vocab_size=19, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "holds an encoder-decoder (t5)" in refused(capsys, [tmp_path / "t5"])
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 19}
    config = SubquadClassifierConfig(**shape, attention="full")
    SubquadForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    assert "holds no causal language model" in refused(capsys, [tmp_path / "classifier"])
    bare = tmp_path / "bare"
    SubquadForCausalLM(SubquadConfig(**SHAPE, attention="full")).save_pretrained(bare)
    text = tmp_path / "text.txt"
    text.write_text("w3")
    assert "holds no tokenizer.json for --text" in refused(capsys, [bare, "--text", text])
    bert = BertConfig(vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    # transformers can build a language model from it, with a new head: what it computes sees later tokens.
    assert run([str(tmp_path / "bert"), *QUICK]) == 1
    assert "failed: causality" in capsys.readouterr().out
