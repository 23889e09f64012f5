"""A finished model whose files were damaged is refused by name; a run's folder has one process that trains it."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from subquad import disk
from subquad.adaptation.adapters import open_merging
from subquad.adaptation.extended import load_causal, load_original
from subquad.adaptation.source import load_source
from subquad.checksums import CHECKSUMS, check_unchanged, trusting, write_checksums
from subquad.cli import importing, main
from subquad.data import load_tokenizer
from subquad.hf import SubquadForCausalLM, lora
from subquad.hf.loading import read_config
from subquad.parsing import read_json_mapping
from subquad.training import train
from subquad.training.runs import load_language_model, load_run
from tests.cli.folders import save_model

FILES = ("model.safetensors", "config.json", "tokenizer.json")


def flip(file, place=-1):
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_a_flipped_bit_is_named(run_at_4, name, part):
    assert set(FILES) <= set(read_json_mapping(run_at_4 / CHECKSUMS))
    check_unchanged(run_at_4)
    file = run_at_4 / name
    flip(file, int(part * file.stat().st_size))
    with pytest.raises(ValueError, match=f"{name} is not as it was saved: its SHA-256 differs"):
        load_run(run_at_4, "cpu")
    with trusting():
        check_unchanged(run_at_4)
    flip(file, int(part * file.stat().st_size))
    load_run(run_at_4, "cpu")


def test_a_missing_file_is_named_and_a_folder_without_checksums_is_read(run_at_4):
    (run_at_4 / CHECKSUMS).unlink()
    flip(run_at_4 / "tokenizer_config.json", 1)
    check_unchanged(run_at_4)
    write_checksums(run_at_4)
    (run_at_4 / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is missing: checksums\.json names it"):
        check_unchanged(run_at_4)


def test_a_checkpoint_is_checked_by_its_manifest_as_a_model(run_at_4):
    folder = run_at_4 / "checkpoints" / "checkpoint-4"
    flip(folder / "optimizer.pt")  # only a resumed run reads it, and checks it
    load_run(folder, "cpu")
    flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is not as it was saved: .* in manifest\.json"):
        load_run(folder, "cpu")
    (folder / "manifest.json").write_text('{"format": "another program\'s", "files": []}')
    check_unchanged(folder)


@pytest.mark.parametrize(("sums", "message"), [
    ("[]", r"checksums\.json must hold a mapping"),
    ('{"config.json": 3}', r"checksums\.json is damaged: 'config\.json' must be a str, got 3"),
    ("{", r"checksums\.json"),
])  # fmt: skip
def test_damaged_checksums_are_named(tmp_path, sums, message):
    (tmp_path / CHECKSUMS).write_text(sums)
    with pytest.raises(ValueError, match=message):
        check_unchanged(tmp_path)


def adapter_of(folder):
    """An adapter of the model in `folder`, beside it."""
    model = lora.add_adapter(lora.load_base(folder), rank=2, base=lora.Base.of(folder))
    lora.save_adapter(model, folder.with_name("adapter"))
    shutil.copy(folder / "tokenizer.json", folder.with_name("adapter"))
    write_checksums(folder.with_name("adapter"))
    return folder.with_name("adapter")


def merge(folder):
    return open_merging(str(folder), str(folder.with_name("merged")), None)


def llama(folder):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=23, **shape)).save_pretrained(folder)
    return folder


LOADS = {
    "generate, eval, serve": (save_model, lambda folder: load_run(folder, "cpu")),
    "export": (save_model, load_language_model),
    "audit": (save_model, load_causal),
    "convert": (save_model, load_source),
    "lora's base": (save_model, lora.load_base),
    "an adapter": (lambda folder: adapter_of(save_model(folder)), lambda folder: load_run(folder, "cpu")),
    "merge": (lambda folder: adapter_of(save_model(folder)), merge),
    "extend": (llama, lambda folder: load_original(folder, read_config(folder))),
    "import": (llama, lambda folder: importing._model(str(folder))),
}


@pytest.mark.parametrize("way", LOADS)
def test_every_way_to_load_a_model_refuses_a_damaged_one(tmp_path, way):
    make, load = LOADS[way]
    folder = make(tmp_path / "model")
    write_checksums(folder)
    load(folder)
    (file,) = folder.glob("*.safetensors")
    flip(file, -4)  # the lowest bits of a weight
    with pytest.raises(ValueError, match=rf"{folder / file.name} is not as it was saved: its SHA-256 differs"):
        load(folder)
    with trusting():
        load(folder)


def generate(folder, *more):
    """The exit status of `subquad generate`."""
    try:
        return main(["generate", str(folder), "--prompt", "def", "--max_tokens", "3", "--device", "cpu", *more])
    except SystemExit as ended:
        return ended.code


def test_a_copy_elsewhere_is_whole_and_one_that_was_cut_off_is_named(run_at_4, tmp_path, capsys):
    copy = shutil.copytree(run_at_4, tmp_path / "elsewhere" / "copy")
    assert generate(copy) == 0
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000])
    assert generate(copy) == 2
    weights.unlink()
    assert generate(copy) == 2
    said = capsys.readouterr().err
    assert f"{weights} is not as it was saved" in said
    assert f"{weights} is missing: checksums.json names it" in said


def test_the_tokenizer_of_another_run_is_refused(run_at_4, capsys):
    other = load_tokenizer("bytes")
    other.add_special_tokens(["<|im_end|>"])
    other.save(str(run_at_4 / "tokenizer.json"))
    assert generate(run_at_4) == 2
    assert "tokenizer.json is not as it was saved" in capsys.readouterr().err


def test_settings_that_were_changed_on_purpose_are_read_if_one_says_so(run_at_4, capsys):
    with (run_at_4 / "generation_config.json").open("r+") as file:
        settings = json.load(file)
        file.seek(0)
        json.dump({**settings, "temperature": 0.5}, file)
    assert generate(run_at_4) == 2
    assert "generation_config.json is not as it was saved" in capsys.readouterr().err
    assert generate(run_at_4, "--trust-changed") == 0
    assert generate(run_at_4) == 2, "it holds for one command"


def test_a_run_that_goes_on_has_new_checksums(run_at_4, make_config):
    before = read_json_mapping(run_at_4 / CHECKSUMS)
    train(make_config(steps=6))
    assert read_json_mapping(run_at_4 / CHECKSUMS).keys() == before.keys()
    assert read_json_mapping(run_at_4 / CHECKSUMS)["model.safetensors"] != before["model.safetensors"]
    assert generate(run_at_4) == 0


def test_a_model_that_transformers_saved_over_is_named_until_its_checksums_are_gone(run_at_4, capsys):
    model = SubquadForCausalLM.from_pretrained(run_at_4)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    model.save_pretrained(run_at_4)
    assert generate(run_at_4) == 2
    assert "model.safetensors is not as it was saved" in capsys.readouterr().err
    (run_at_4 / CHECKSUMS).unlink()
    assert generate(run_at_4) == 0


HOLD = """import sys
from pathlib import Path
from subquad import disk
with disk.claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_trains_is_refused_and_free_once_it_ended(make_config, tmp_path, capsys):
    config = make_config()
    config.to_file(tmp_path / "c.yaml")
    holder = tmp_path / "run/.process"
    with subprocess.Popen([sys.executable, "-c", HOLD, holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"run' is being trained by process {other.pid} on .*: wait for it"):
            train(config)
        assert main(["train", "--config", str(tmp_path / "c.yaml")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"is being trained by process {other.pid}" in line
        other.kill()
        other.wait()
    assert train(config).steps == 4
    with disk.claimed(holder):
        pass  # free again
