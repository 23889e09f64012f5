"""`subquad import` and `subquad export`: whole folders that the other commands read."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from subquad.cli import main
from subquad.data import load_tokenizer
from subquad.data.files import MODEL_FILES
from subquad.generation import generate
from subquad.hf import from_transformers
from subquad.testing import assert_exact
from tests.fuzz.targets import write_llama2c, write_llama2c_tokenizer
from tests.hf.small import HYBRID

SMALL = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def llama(tmp_path):
    """A transformers folder with a tokenizer and a chat template."""
    torch.manual_seed(0)
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS)).save_pretrained(folder)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    for name, text in {
        "tokenizer_config.json": '{"eos_token": "a"}', "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ messages }}", "tokenizer.model": "pieces",
        "generation_config.json": '{"eos_token_id": [2, 7], "repetition_penalty": 1.3}',
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def stories(tmp_path):
    """A llama2.c checkpoint and its tokenizer."""
    write_llama2c(tmp_path / "a.bin", 300)
    write_llama2c_tokenizer(tmp_path / "tok.bin")
    return tmp_path / "a.bin", tmp_path / "tok.bin"


def json_or_text(file):
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_text()


def test_a_transformers_folder_comes_in_and_goes_out_again(llama, tmp_path, printed):
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert f"{ours} holds the model, 10,416 parameters" in printed("import", llama, "--out", ours)
    assert json.loads((ours / "config.json").read_text())["model_type"] == "subquad"
    assert "holds a LlamaForCausalLM (llama) of transformers" in printed("export", ours, "--out", back)
    before, after = load_file(llama / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_exact(after[name], tensor, name)
    for name in MODEL_FILES:
        assert json_or_text(back / name) == json_or_text(llama / name)
    printed("import", llama, "--out", tmp_path / "other", "--tokenizer", llama)
    assert json_or_text(tmp_path / "other" / "generation_config.json")["eos_token_id"] == [2, 7]
    assert json_or_text(tmp_path / "other" / "tokenizer_config.json")["eos_token"] == "a", "the tokenizer's own name"


@pytest.mark.parametrize(("name", "values"), [
    ("MistralForCausalLM", HEADS | {"sliding_window": 8, "num_key_value_heads": 1}),
    ("Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 8, "n_groups": 2, "time_step_limit": (0.0, 1.0)}),
    ("GraniteMoeHybridForCausalLM", HEADS | {"num_local_experts": 0, "layer_types": ["mamba"], "mamba_n_heads": 4}),
    ("Qwen3_5ForCausalLM", HYBRID | {"vocab_size": 256}),
    ("Qwen3NextForCausalLM", HYBRID | {"vocab_size": 256, "num_experts": 0}),
])  # fmt: skip
def test_windows_and_recurrent_layers_come_in_generate_and_go_out_again(name, values, tmp_path, printed):
    theirs, ours, back = (tmp_path / place for place in ("theirs", "ours", "back"))
    cls = getattr(transformers, name)
    cls(cls.config_class(**SMALL | values, eos_token_id=None)).save_pretrained(theirs)
    load_tokenizer("bytes").save(str(theirs / "tokenizer.json"))
    printed("import", theirs, "--out", ours)
    attention = json.loads((ours / "config.json").read_text())["attention"]
    assert attention in ("window", "mamba2", ["mamba2"], [*["gated_delta_net"] * 3, "full"])
    text = printed("generate", ours, "--prompt", "ab", "--max_tokens", "40", "--temperature", "0")
    tokens = list(generate(from_transformers(theirs).decoder, list(b"ab"), max_new_tokens=40, temperature=0))
    assert text == f"ab{load_tokenizer('bytes').decode(tokens)}\n"
    assert f"holds a {name}" in printed("export", ours, "--out", back, "--family", cls.config_class.model_type)
    before, after = load_file(theirs / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert_exact(after[key], tensor, key)


@pytest.mark.parametrize("command", ["generate", "serve", "eval"])
def test_the_help_of_commands_that_load_a_model_says_which_folders_they_take(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Folder of a subquad model: a run, one of its checkpoints, a LoRA adapter" in text
    assert "`subquad import` first makes one of another transformers model, such as that of a merged extension" in text


def test_the_families_in_the_help_are_those_that_there_are():
    from subquad.cli import exporting
    from subquad.hf.families import FAMILIES

    assert tuple(FAMILIES) == exporting.NAMES


def test_a_llama2c_checkpoint_is_generated_from_measured_and_audited(stories, tmp_path, capsys, printed):
    ours, text, kept = tmp_path / "ours", tmp_path / "text.txt", tmp_path / "kept"
    printed("import", stories[0], "--out", ours, "--tokenizer", stories[1])
    assert json.loads((ours / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    for prompt, more, tokens in (
        ("", [], 1),
        ("abc", ["--state-out", str(kept)], 2),
        ("abc", ["--state-in", str(kept)], 1),  # no second begin-of-text token
    ):
        assert main(["generate", str(ours), "--prompt", prompt, "--max_tokens", str(4 if not more else 0), *more]) == 0
        assert f"prompt: {tokens} tokens" in capsys.readouterr().err
    text.write_text("abc abc ab a\n" * 20)
    measure = ["--data.path", text, "--length", "8", "--data.cache", tmp_path / "cache"]
    assert "nats per token" in printed("eval", ours, *measure)
    printed("audit", ours, "--tokens", "8", "--batch", "2", "--long", "0", "--contexts", "[]")


def test_a_missing_tokenizer_is_named_and_one_of_another_model_refused(stories, tmp_path, capsys, refused):
    assert main(["import", str(stories[0]), "--out", str(tmp_path / "ours")]) == 0
    shown = capsys.readouterr()
    assert "has no tokenizer, which generate, eval and serve need: use --tokenizer" in shown.err
    assert "subquad generate" not in shown.out
    assert not (tmp_path / "ours" / "tokenizer.json").exists()
    write_llama2c(stories[0], 20)
    message = refused("import", stories[0], "--out", tmp_path / "o", "--tokenizer", stories[1])
    assert "the tokenizer has 271 tokens, the model knows 20" in message
    assert not (tmp_path / "o").exists()


def test_a_folder_that_is_not_empty_stays_as_it_is(llama, tmp_path, refused, printed):
    for command in ("import", "export"):
        assert "is not empty; --out must name a new or empty folder" in refused(command, llama, "--out", llama)
        assert "lies below a file" in refused(command, llama, "--out", llama / "config.json" / "a")
    (tmp_path / "empty").mkdir()
    printed("import", llama, "--out", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_models_that_cannot_be_converted_are_refused(llama, tmp_path, refused):
    def message(command, folder, *more):
        return refused(command, folder, *more, "--out", tmp_path / "out")

    assert "holds a model of type 'llama'; it must be 'subquad'" in message("export", llama)
    damaged = tmp_path / "damaged"
    shutil.copytree(llama, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    assert "damaged holds a model whose weights are damaged: model.decoder.norm.weight" in message("import", damaged)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "make one plain model of it and its base with: " in message("export", tmp_path / "adapter")
    assert not (tmp_path / "out").exists()
