"""`subquad convert` from the command to the folder that it leaves."""

import json
import shutil
from datetime import date

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from subquad.adaptation import ConvertConfig, conversion, convert, transfer
from subquad.adaptation.conversion import NAMES, Stages
from subquad.adaptation.transfer import tune
from subquad.cli import main, threads
from subquad.evaluation import provenance
from subquad.hf import SubquadForCausalLM
from subquad.state import weights_hash
from subquad.testing import assert_exact, assert_same_maths
from subquad.training import losses
from tests.adaptation.models import save
from tests.adaptation.test_source import theirs
from tests.training.helpers import assert_same_weights, failed

CASES = {"llp": ("segment=8", 2), "window": ("width=6", 4), "linear": ("", 0), "latte_macchiato": ("width=6", 2)}
DROPOUT = ("--match.window_dropout", "0.8")
AUDIT = ("--tokens", "12", "--long", "16", "--contexts", "[8,16]", "--repeats", "1")


def weights(folder):
    return load_file(folder / "model.safetensors")


def command(model, texts, folder, attention, *more):
    """The command of a conversion that takes a second."""
    sizes = {
        "batch.length": 32, "batch.size": 2, "match.steps": 6, "lora.steps": 6, "lora.rank": 2, "measure.windows": 4,
        "measure.contexts": "[8,64]", "measure.repeats": 2, "data.cache": folder.parent / "cache", "data.held_out": 0.2,
    }  # fmt: skip
    option, keep_every = CASES[attention]
    chosen = ["--keep_every", str(keep_every), *([f"--options.{attention}.{option}"] if option else [])]
    words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
    return [
        "convert", str(model), "--attention", attention, "--data", str(texts), "--out", str(folder), *chosen, *words,
        *more,
    ]  # fmt: skip


class Watch:
    """Record the probabilities by which windows are closed; raise at some of the calls."""

    def __init__(self, *stops):
        self.seen, self.stops, self.plain = [], stops, transfer.windows_dropped

    def __call__(self, model, probability, generator):
        self.seen.append(probability)
        if len(self.seen) in self.stops:
            raise KeyboardInterrupt
        return self.plain(model, probability, generator)


@pytest.fixture(scope="module")
def converted(original, texts, tmp_path_factory):
    """A conversion while one core is free: its command, its folder, and the probabilities of closed windows."""
    home, watch, before = tmp_path_factory.mktemp("converted"), Watch(), torch.get_num_threads()
    shutil.copytree(original, home / "source")
    (home / "source" / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    (home / "source" / "generation_config.json").write_text('{"eos_token_id": 97, "max_new_tokens": 5}')
    words = command(home / "source", texts, home / "out", "latte_macchiato", *DROPOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "windows_dropped", watch)
        patch.setattr(threads, "free_threads", lambda: 1)
        assert main(words) == 0
    torch.set_num_threads(before)
    return words, home / "out", watch.seen


def check_report(folder, attention):
    """Check the report and the stages of a conversion; return the report."""
    keep_every = CASES[attention][1]
    report = json.loads((folder / "report.json").read_text())
    assert [stage["stage"] for stage in report["stages"]] == list(NAMES)
    layers = report["layers"]["kept"] + report["layers"]["replaced"]
    assert report["layers"]["kept"] == [i for i in sorted(layers) if keep_every and i % keep_every == 0]
    first, last = report["stages"][0], report["stages"][-1]
    assert report["gap"]["loss"] == last["loss"] - first["loss"]
    losses = [part["loss"] for part in last["branches"]]
    assert losses[0] == last["loss"]
    assert len(set(losses)) == len(losses), "each branch does something"
    matched, tuned = (weights(folder / "stages" / name) for name in ("3-matched", "4-tuned"))
    moved = {name for name in tuned if not torch.equal(matched[name], tuned[name])}
    frozen = ("norm", "embedding", "head", "bias")
    assert {name for name in tuned if not any(part in name for part in frozen)} <= moved
    states = [row["state_bytes"] for row in last["decoding"]]
    assert (states[0] < states[-1]) == (bool(keep_every) and len(states) > 1), "only kept layers' states grow"
    assert (folder / "convert.png").stat().st_size > 10_000
    return report


def check_model(folder):
    """Check that the model loads, generates and passes an audit."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt, options = torch.tensor([[1, 4, 5]]), {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    assert_exact(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options), "greedy text")
    assert main(["audit", str(folder), *AUDIT]) == 0
    assert main(["generate", str(folder), "--prompt", "w1 w2", "--max_tokens", "2"]) == 0


def test_a_conversion_leaves_a_report_and_a_model_that_generates_and_passes_an_audit(converted):
    _, folder, _ = converted
    report = check_report(folder, "latte_macchiato")
    assert "the tokenizer cannot spell digits" in report["stages"][0]["passkey_missing"]
    assert report["date"] == date.today().isoformat()
    assert all(stage["seconds"] > 0 and stage["about"]["date"] == report["date"] for stage in report["stages"])
    check_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (folder.parent / "source" / name).read_bytes()
    assert SubquadForCausalLM.from_pretrained(folder).generation_config.max_new_tokens == 5


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [
    (None, "llp"), (None, "window"), (None, "linear"), ("gpt2", "latte_macchiato"), ("qwen3", "linear"),
])  # fmt: skip
def test_every_family_and_mechanism_can_be_converted(original, texts, tmp_path, family, attention):
    model = tmp_path / "theirs" if family else original
    if family:
        theirs(family).save_pretrained(model)
        shutil.copyfile(original / "tokenizer.json", model / "tokenizer.json")
    assert main(command(model, texts, tmp_path / "out", attention)) == 0
    check_report(tmp_path / "out", attention)
    check_model(tmp_path / "out")


def test_the_probability_that_a_window_is_closed_falls_to_zero(converted):
    falls = torch.tensor([0.8, 0.64, 0.48, 0.32, 0.16, 0, 0.25, 0.2, 0.15, 0.1, 0.05, 0], dtype=torch.float64)
    assert_same_maths(torch.tensor(converted[2], dtype=torch.float64), falls)


def test_a_complete_conversion_is_not_run_again_and_keeps_its_threads_and_its_report(converted, monkeypatch):
    words, folder, seen = converted
    assert json.loads((folder / "conversion.json").read_text())["threads"] == 1
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"}
    monkeypatch.setattr(threads, "free_threads", lambda: 2)
    monkeypatch.setattr(transfer, "windows_dropped", None)
    monkeypatch.setattr(provenance, "provenance", lambda *_: {"date": "another", "machine": {}})
    assert main(words) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert len(seen) == 12


def test_an_interrupted_conversion_resumes_to_the_same_bits(converted, original, texts, tmp_path, monkeypatch):
    folder, watch = tmp_path / "again", Watch(3, 11)
    words = command(original, texts, folder, "latte_macchiato", *DROPOUT, "--threads", "1")
    monkeypatch.setattr(transfer, "windows_dropped", watch)
    for complete in (2, 3):
        assert main(words) == 130
        stages = sorted(path.name for path in (folder / "stages").iterdir() if path.name[0] != ".")
        assert stages == [f"{i + 1}-{name}" for i, name in enumerate(NAMES[:complete])]
        assert not (folder / "config.json").exists()
    assert main(words) == 0
    assert_same_weights(converted[1], folder)


def test_convert_is_a_function_too(original, texts, tmp_path, monkeypatch):
    values = {
        "out": str(tmp_path / "out"), "attention": "linear", "keep_every": 2,
        "data": {"path": str(texts), "cache": str(tmp_path / "cache"), "held_out": 0.2},
        "batch": {"length": 16, "size": 2, "accumulation": 2}, "match": {"steps": 2, "train": "new"},
        "lora": {"steps": 2, "rank": 1}, "measure": {"windows": 2, "contexts": [4], "repeats": 1, "passkeys": 0},
        "loss": {"z_weight": 0.01},
    }  # fmt: skip
    config, begun = ConvertConfig.from_dict(values), []
    monkeypatch.setattr(
        conversion, "tune", lambda model, *more: begun.append(weights_hash(model)) or tune(model, *more)
    )
    z_loss, weights_of_z = losses.z_loss, []
    monkeypatch.setattr(
        losses, "z_loss", lambda *args, weight: weights_of_z.append(weight) or z_loss(*args, weight=weight)
    )
    calls = []
    report = convert(original, config, progress=lambda *words: calls.append(words[:3]))
    assert calls == [("match", 1, 2), ("match", 2, 2), ("lora", 1, 2), ("lora", 2, 2)]
    assert weights_of_z == [0.01] * 4, "in each batch of the adaptation"
    assert report["options"] == {"feature_map": "learned", "rotary": True}
    new = 2 * 4 * 16 * 2  # two maps of 4 x 4 for each of 4 heads, in 2 layers
    grown = 2 * 2 * 2 * 4 * 16  # keys and values of 2 shared heads become those of 4
    assert report["parameters"]["new"] == new
    assert report["parameters"]["converted"] == report["parameters"]["original"] + new + grown
    assert report["stages"][0]["passkey_missing"] == "not asked for"
    before, matched = weights(original), weights(tmp_path / "out" / "stages" / "3-matched")
    changed = {name for name in matched if name not in before or not torch.equal(matched[name], before[name])}
    maps = {f"model.decoder.layers.{i}.attention.{kind}_map" for i in (0, 2) for kind in ("query", "key")}
    shared = {f"model.decoder.layers.{i}.attention.{kind}.weight" for i in (0, 2) for kind in ("key", "value")}
    assert changed == maps | shared, "match.train=new trains the maps alone; keys and values are shared out"
    assert begun == [weights_hash(SubquadForCausalLM.from_pretrained(tmp_path / "out" / "stages" / "3-matched"))]


@pytest.mark.parametrize(("more", "match"), [
    (["--attention", "lpp"], "attention must be latte_macchiato, linear, llp or window, got 'lpp'; did you mean 'llp'"),
    (["--options.llp.segments", "4"], "attention 'llp' has no option 'segments'; did you mean 'segment'"),
    (["--batch.length", "500"], "fewer than batch.length + 1 = 501; give more text"),
    (["--batch.length", "8"], "options.llp.segment=8 must be below batch.length=8: otherwise it is full attention"),
    (["--data", "nowhere"], "there is no file or folder 'nowhere'"),
])  # fmt: skip
def test_a_wrong_command_is_refused_before_anything_is_written(original, texts, tmp_path, capsys, more, match):
    assert match in failed(capsys, *command(original, texts, tmp_path / "out", "llp"), *more)
    assert not (tmp_path / "out").exists()


def test_a_folder_keeps_to_its_conversion(tmp_path):
    for _ in range(2):
        Stages(tmp_path / "out", {"seed": 0, "match": {"lr": 0.003}})
    with pytest.raises(ValueError, match=r"out holds another conversion \(match.lr was 0.003, is 0.5\); --out"):
        Stages(tmp_path / "out", {"seed": 0, "match": {"lr": 0.5}})
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="else holds files that no conversion wrote; --out must name a new folder"):
        Stages(tmp_path / "else", {})
    with pytest.raises(ValueError, match=r"notes\.txt is a file; --out must name a new folder"):
        Stages(tmp_path / "else" / "notes.txt", {})


def test_learned_positions_bound_the_windows(texts, tmp_path):
    folder = save(tmp_path / "model", position="learned", max_positions=16)
    settings = {"out": str(tmp_path / "out"), "data": {"path": str(texts), "cache": str(tmp_path / "cache")}}
    with pytest.raises(ValueError, match=r"batch.length=17 exceeds the model's 16 learned positions"):
        convert(folder, ConvertConfig.from_dict({**settings, "batch": {"length": 17}}))
