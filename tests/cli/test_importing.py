"""`subquad import` and `subquad export`: whole folders, that the other commands read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from subquad.cli import main
from subquad.data import load_tokenizer
from subquad.data.files import MODEL_FILES
from subquad.testing import assert_exact
from tests.fuzz.targets import write_llama2c, write_llama2c_tokenizer

SMALL = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of transformers with a tokenizer and a chat template."""
    torch.manual_seed(0)
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS)).save_pretrained(folder)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.model").write_text("pieces")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "repetition_penalty": 1.3}')
    return folder


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A checkpoint of llama2.c and its tokenizer."""
    write_llama2c(tmp_path / "a.bin", 300)
    write_llama2c_tokenizer(tmp_path / "tok.bin")
    return tmp_path / "a.bin"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with status 2, without a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found.err


def test_a_folder_of_transformers_comes_in_and_goes_out_again(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["import", str(llama), "--out", str(ours)]) == 0
    assert f"{ours} holds the model, 10,416 parameters" in capsys.readouterr().out
    assert json.loads((ours / "config.json").read_text())["model_type"] == "subquad"
    assert main(["export", str(ours), "--out", str(back)]) == 0
    assert "holds a LlamaForCausalLM (llama) of transformers" in capsys.readouterr().out
    before, after = load_file(llama / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_exact(after[name], tensor, name)
    for name in MODEL_FILES:
        assert json_or_text(back / name) == json_or_text(llama / name)


def json_or_text(file: Path) -> object:
    text = file.read_text()
    return json.loads(text) if file.suffix == ".json" else text


def test_a_checkpoint_of_llama2c_is_generated_from_measured_and_audited(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, text = tmp_path / "ours", tmp_path / "text.txt"
    assert main(["import", str(stories), "--out", str(ours), "--tokenizer", str(tmp_path / "tok.bin")]) == 0
    assert json.loads((ours / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    capsys.readouterr()
    assert main(["generate", str(ours), "--prompt", "", "--max_tokens", "4", "--device", "cpu"]) == 0
    assert "prompt: 1 tokens" in capsys.readouterr().err
    kept = tmp_path / "kept"
    asked = ["generate", str(ours), "--prompt", "abc", "--max_tokens", "0", "--device", "cpu"]
    assert main([*asked, "--state-out", str(kept)]) == 0
    assert "prompt: 2 tokens" in capsys.readouterr().err
    assert main([*asked, "--state-in", str(kept)]) == 0  # goes on: no second beginning
    assert "prompt: 1 tokens" in capsys.readouterr().err
    text.write_text("abc abc ab a\n" * 20)
    cache = ["--data.cache", str(tmp_path / "cache")]
    measure = ["eval", str(ours), "--data.path", str(text), "--length", "8", "--device", "cpu"]
    assert main([*measure, *cache]) == 0
    assert "nats a token" in capsys.readouterr().out
    checks = ["--tokens", "8", "--batch", "2", "--long", "0", "--contexts", "[]", "--device", "cpu"]
    assert main(["audit", str(ours), *checks]) == 0


def test_without_a_tokenizer_it_is_said(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(stories), "--out", str(tmp_path / "ours")]) == 0
    shown = capsys.readouterr()
    assert "has no tokenizer: give one by --tokenizer" in shown.err
    assert "subquad generate" not in shown.out, "which needs one"
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_a_tokenizer_of_another_model_is_refused(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama2c(stories, 20)
    message = refused(
        capsys, "import", str(stories), "--out", str(tmp_path / "o"), "--tokenizer", str(tmp_path / "tok.bin")
    )
    assert "the tokenizer has 271 tokens, the model knows 20" in message
    assert not (tmp_path / "o").exists()


def test_what_is_there_stays(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("import", "export"):
        message = refused(capsys, command, str(llama), "--out", str(llama))
        assert "is there already; --out must name a new or an empty folder" in message
        message = refused(capsys, command, str(llama), "--out", str(llama / "config.json" / "a"))
        assert "is below a file" in message
    (tmp_path / "empty").mkdir()
    assert main(["import", str(llama), "--out", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_what_is_no_model_is_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert "holds a model of type 'llama'; it must be 'subquad'" in refused(capsys, "export", str(llama), *out)
    assert "there is no folder" in refused(capsys, "export", str(tmp_path / "nowhere"), *out)
    message = refused(capsys, "import", str(llama), "--tokenizer", "bpe", *out)
    assert "the tokenizer 'bpe' has to be trained first" in message
    assert "there is no folder nowhere, and the hub gives no" in refused(capsys, "import", "nowhere", *out)
    damaged = tmp_path / "damaged"
    shutil.copytree(llama, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    message = refused(capsys, "import", str(damaged), *out)
    assert "damaged holds a model whose weights are damaged: model.norm.weight is not finite" in message
    (tmp_path / "nothing").mkdir()
    assert "holds no config.json" in refused(capsys, "import", str(tmp_path / "nothing"), *out)
    values = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**values, "hidden_act": "relu"}))
    message = refused(capsys, "import", str(llama), *out)
    assert "hidden_act='relu'" in message
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    message = refused(capsys, "export", str(tmp_path / "adapter"), "--out", str(tmp_path / "out"))
    assert "holds an adapter; `subquad lora merge` makes one plain model" in message
