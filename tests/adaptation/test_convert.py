"""`subquad convert` from the command to the folder that it leaves."""

import json
import shutil
from datetime import date

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from subquad.adaptation import ConvertConfig, convert, transfer
from subquad.adaptation.conversion import NAMES
from subquad.cli import main, threads
from subquad.evaluation import provenance
from subquad.hf import SubquadForCausalLM
from subquad.testing import assert_exact, assert_same_maths

CASES = {
    "llp": ("segment=8", 2),
    "window": ("width=6", 4),
    "linear": ("", 0),
    "latte_macchiato": ("width=6", 2),
}
STATE_BYTES = {"llp": True, "window": True, "linear": False, "latte_macchiato": True}
"""Whether the state grows, since layers with full attention are kept."""


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("attention", CASES)
def test_a_conversion_leaves_a_model_that_loads_generates_and_passes_an_audit(flags, tmp_path, capsys, attention):
    option, keep_every = CASES[attention]
    assert main(flags(attention, "--keep_every", str(keep_every), option=option)) == 0
    shown, folder = capsys.readouterr().out, tmp_path / "out"
    for words in (
        "after replacing",
        "after matching",
        "after LoRA",
        "kept layers' attention"[: 4 if keep_every else 0],
    ):
        assert words in shown
    report = json.loads((folder / "report.json").read_text())
    assert [stage["stage"] for stage in report["stages"]] == list(NAMES)
    assert report["layers"]["kept"] == [i for i in range(1, 5) if keep_every and i % keep_every == 0]
    first, last = report["stages"][0], report["stages"][-1]
    assert report["gap"]["loss"] == last["loss"] - first["loss"]
    losses = [part["loss"] for part in last["branches"]]
    assert losses[0] == last["loss"]
    assert len(set(losses)) == len(losses), "each branch does something"
    matched, tuned = (weights(folder / "stages" / name) for name in ("3-matched", "4-tuned"))
    moved = {name for name in tuned if not torch.equal(matched[name], tuned[name])}
    assert {name for name in tuned if "norm" not in name and "embedding" not in name and "head" not in name} <= moved
    states = [row["state_bytes"] for row in last["decoding"]]
    assert (states[0] < states[1]) == STATE_BYTES[attention]
    assert (folder / "convert.png").stat().st_size > 10_000

    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt, options = torch.tensor([[1, 4, 5]]), {"max_new_tokens": 9, "do_sample": False}
    assert_exact(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options), "greedy text")
    sizes = ["--tokens", "12", "--long", "16", "--contexts", "[8,16,32]", "--repeats", "1"]
    assert main(["audit", str(folder), *sizes]) == 0
    assert main(["generate", str(folder), "--prompt", "w1 w2", "--max_tokens", "2"]) == 0


def test_an_interrupted_conversion_goes_on_to_the_same_bits(flags, tmp_path, monkeypatch):
    option = CASES["latte_macchiato"][0]
    whole = flags("latte_macchiato", "--keep_every", "2", "--threads", "1", option=option)
    again = flags("latte_macchiato", "--keep_every", "2", "--threads", "1", option=option, out="again")
    assert main(whole) == 0

    losses, plain = [], transfer.windows_dropped

    def stopped(model, probability, generator):
        losses.append(probability)
        if len(losses) in (3, 11):
            raise KeyboardInterrupt
        return plain(model, probability, generator)

    monkeypatch.setattr(transfer, "windows_dropped", stopped)
    for complete in (2, 3):
        assert main(again) == 130
        stages = sorted(path.name for path in (tmp_path / "again" / "stages").iterdir() if path.name[0] != ".")
        assert stages == [f"{i + 1}-{name}" for i, name in enumerate(NAMES[:complete])]
        assert not (tmp_path / "again" / "config.json").exists()
    assert main(again) == 0
    expected, found = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert_exact(found[name], weight, name)
    trained, report = len(losses), tmp_path / "again" / "report.json"
    before = report.read_bytes()
    monkeypatch.setattr(provenance, "provenance", lambda *_: {"date": "another", "machine": {}})
    assert main(again) == 0
    assert len(losses) == trained, "a complete conversion is not run again"
    assert report.read_bytes() == before, "the report says where and when it was measured"
    values = json.loads(before)
    assert values["date"] == date.today().isoformat()
    assert all(stage["seconds"] > 0 and stage["about"]["date"] == values["date"] for stage in values["stages"])


def test_a_conversion_keeps_to_the_cores_that_are_free(flags, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    try:
        assert main(flags("llp")) == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["threads"] == 1
    monkeypatch.setattr(threads, "free_threads", lambda: 2)
    assert main(flags("llp")) == 0, "the number that the conversion began with"


def test_the_probability_that_a_window_is_closed_falls_to_zero(flags, monkeypatch):
    seen = []
    plain = transfer.windows_dropped

    def watched(model, probability, generator):
        seen.append(probability)
        return plain(model, probability, generator)

    monkeypatch.setattr(transfer, "windows_dropped", watched)
    assert main(flags("latte_macchiato", "--match.window_dropout", "0.8", option="width=6")) == 0
    match, tune = seen[:6], seen[6:]
    falls = torch.tensor([0.8, 0.64, 0.48, 0.32, 0.16, 0], dtype=torch.float64)
    assert_same_maths(torch.tensor(match, dtype=torch.float64), falls)
    assert (tune[0], tune[-1]) == (0.25, 0)
    assert sorted(tune, reverse=True) == tune


def test_matching_lowers_the_error_of_each_replaced_layer(flags, tmp_path):
    command = flags("window", "--keep_every", "0", "--match.steps", "60", "--match.lr", "0.01", option="width=2")
    assert main(command) == 0
    before, after = (
        json.loads((tmp_path / "out" / "stages" / f"{i}-{NAMES[i - 1]}" / "stage.json").read_text())["errors"]
        for i in (2, 3)
    )
    assert len(before) == 4
    assert all(b < a for a, b in zip(before, after, strict=True)), (before, after)


def test_convert_is_a_function_too(original, texts, tmp_path):
    config = ConvertConfig.from_dict(
        {
            "out": str(tmp_path / "out"),
            "attention": "linear",
            "keep_every": 2,
            "data": {"path": str(texts), "cache": str(tmp_path / "cache"), "held_out": 0.2},
            "batch": {"length": 16, "size": 2, "accumulation": 2},
            "match": {"steps": 2, "train": "new"},
            "lora": {"steps": 2, "rank": 1},
            "measure": {"windows": 2, "contexts": [4], "repeats": 1, "passkeys": 0},
        }
    )
    calls = []
    report = convert(original, config, progress=lambda *words: calls.append(words[:3]))
    assert calls == [("match", 1, 2), ("match", 2, 2), ("lora", 1, 2), ("lora", 2, 2)]
    assert report["options"] == {"feature_map": "learned", "rotary": True}
    # Two maps of 4 x 4 a head, of 4 heads, in 2 layers.
    assert report["parameters"]["new"] == 2 * 4 * 16 * 2
    # Keys and values of 2 shared heads become those of 4.
    grown = 2 * 2 * 2 * 4 * 16
    assert report["parameters"]["converted"] == report["parameters"]["original"] + report["parameters"]["new"] + grown
    assert report["stages"][0]["passkey_missing"] == "not asked for"
    original_weights, matched = weights(original), weights(tmp_path / "out" / "stages" / "3-matched")
    changed = {
        name
        for name in matched
        if name not in original_weights or not torch.equal(matched[name], original_weights[name])
    }
    maps = {f"model.layers.{i}.attention.{kind}_map" for i in (0, 2) for kind in ("query", "key")}
    shared = {f"model.layers.{i}.attention.{kind}.weight" for i in (0, 2) for kind in ("key", "value")}
    assert changed == maps | shared, "match.train=new trains the maps alone; keys and values are shared out"


def test_what_belongs_to_the_tokenizer_goes_along_and_no_contexts_need_be_timed(original, flags, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(original, source)
    (source / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (source / "generation_config.json").write_text('{"eos_token_id": 97, "max_new_tokens": 5}')
    assert main(flags("llp", "--measure.contexts", "[]", model=source)) == 0
    assert "nothing was timed: no measure.contexts" in capsys.readouterr().out
    assert (tmp_path / "out" / "convert.png").is_file()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert SubquadForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 5
