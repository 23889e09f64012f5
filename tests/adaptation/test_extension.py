"""`subquad extend`: one command from a checkpoint to an adapter, a report and a merged model."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from subquad.adaptation import extend as extend_model
from subquad.adaptation import extended
from subquad.adaptation.config import SPANS, ExtendConfig
from subquad.adaptation.extension import ExtensionTask, extended_config, scaled_config
from subquad.adaptation.extension_report import draw
from subquad.cli import audit, extend, main, threads
from subquad.cli import lora as lora_command
from subquad.cli.eval import load_for_tasks
from subquad.data.tokenizers import bytes_tokenizer
from subquad.evaluation.config import EvalConfig
from subquad.testing import assert_exact, assert_same_maths
from subquad.training.errors import StepMemoryError
from subquad.training.processes import Processes
from tests.training.helpers import assert_same_weights, failed, raising

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
OWN, LENGTH = 16, 64
QUICK = ("--tokens", "24", "--long", "0", "--contexts", "[]")


def save(folder, dtype=torch.float32, **changes):
    """A tiny Llama with a tokenizer of bytes."""
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, **changes}
    config = LlamaConfig(
        **shape, num_attention_heads=2, max_position_embeddings=OWN, tie_word_embeddings=True, eos_token_id=0
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    bytes_tokenizer().save(str(folder / "tokenizer.json"))


def command(home, name, *arguments, steps=4, model="model"):
    fixed = {
        "length": LENGTH, "data.path": home / "text.txt", "data.cache": home / "cache", "data.held_out": 0.2,
        "run.folder": home / name, "run.steps": steps, "run.precision": "float32", "run.save_every": 2,
        "run.eval_every": 2, "run.eval_windows": 2, "run.log_every": 1, "schedule.warmup": 1, "batch.accumulation": 2,
        "eval.tokens": 64, "eval.stretches": 2, "optimizer.lr": 0.01, "lora.dropout": 0.1,
    }  # fmt: skip
    flags = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
    return [str(home / model), *flags, *arguments]


@pytest.fixture(scope="module")
def trained():
    """Attention, scaling, tokens and threads of each forward pass that the extension and its control trained."""
    return []


@pytest.fixture(scope="module")
def home(tmp_path_factory, trained):
    """A model, a text, and one finished extension with its control, made while one core was free."""

    def recorded(self, model, batch, labels):
        config, tokens = model.config, batch["input_ids"].clone()
        factor = config.rope_parameters.get("factor")
        trained.append((config._attn_implementation, factor, torch.get_num_threads(), tokens))
        return loss(self, model, batch, labels)

    loss = ExtensionTask.loss
    home = tmp_path_factory.mktemp("extend")
    save(home / "model")
    (home / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (home / "text.txt").write_text("".join(f"{i} and {i * i}.\n" for i in range(900)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtensionTask, "loss", recorded)
        patch.setattr(threads, "free_threads", lambda: 1)
        assert extend.run(command(home, "run", "--control", "true")) == 0
    return home


def test_one_command_leaves_an_adapter_a_report_and_a_picture(home):
    folder = home / "run"
    assert {path.name for path in folder.iterdir()} >= {
        "adapter_model.safetensors", "adapter_config.json", "config.json", "config.yaml", "base.json", "report.json",
        "loss_by_position.png", "README.md", "tokenizer.json", "control", "metrics.jsonl",
    }  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert list(report["loss"]) == [
        "original", "scaled, untrained", "control", "extended", "extended, shifted attention",
    ]  # fmt: skip
    ranges = [(entry["first"], entry["last"], entry["predictions"]) for entry in report["loss"]["extended"]]
    assert ranges == [(1, 8, 64), (9, 16, 64), (17, 32, 128), (33, 64, 256)]
    assert (report["step_tokens"], report["train_tokens"]) == (2 * LENGTH, 4 * 2 * LENGTH)
    assert report["loss"]["original"] != report["loss"]["scaled, untrained"]
    assert ExtendConfig.from_file(folder / "config.yaml").run.threads == 1
    control = ExtendConfig.from_file(folder / "control" / "config.yaml")
    assert (control.length, control.batch.size, control.run.steps, control.attention) == (OWN, 4, 4, "full")
    assert not control.control
    assert AutoConfig.from_pretrained(folder).rope_parameters["factor"] == LENGTH / OWN
    assert not any(hasattr(AutoConfig.from_pretrained(place), "subquad") for place in (folder, folder / "control"))


def test_every_line_of_the_picture_has_a_name(home):
    (axes,) = draw(json.loads((home / "run" / "report.json").read_text())).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(names) == len(axes.lines) == 6
    assert f"{OWN} tokens, the original's own length" in names


def test_the_summary_compares_the_losses_within_and_beyond_the_own_length(home):
    report = json.loads((home / "run" / "report.json").read_text())
    found = report["summary"]["extended"]
    assert found["within"] == report["loss"]["extended"][1]["loss"]
    assert found["beyond"] < report["summary"]["scaled, untrained"]["beyond"]
    near, *far = (np.array(entry["stretches"]) for entry in report["loss"]["extended"][1:])
    each = (far[0] + 2 * far[1]) / 3 - near
    error = np.sqrt(((each - each.mean()) ** 2).sum() / (len(each) * (len(each) - 1)))
    for name, expected in (("difference", each.mean()), ("standard_error", error)):
        assert_same_maths(torch.tensor(found[name]).double(), torch.tensor(expected))
    shown = f"{found['difference']:+.4f} ± {found['standard_error']:.4f}"
    readme = (home / "run" / "README.md").read_text()
    assert re.search(rf"^\| less 9 to 16 \|.* {re.escape(shown)} \|", readme, re.MULTILINE)
    assert "PeftModel.from_pretrained(original" in readme


@pytest.mark.usefixtures("home")
def test_extension_and_control_train_as_they_say_on_the_same_windows(trained):
    extension, control = trained[:8], trained[8:]
    assert len(control) == 8, "four steps of two forward passes"
    assert {step[:3] for step in extension} == {("subquad_shifted", LENGTH / OWN, 1)}
    assert {step[:3] for step in control} == {("sdpa", None, 1)}
    for (*_, long), (*_, short) in zip(extension, control, strict=True):
        assert long.shape == (1, LENGTH)
        assert short.tolist() == [long[0, i * (OWN - 1) :][:OWN].tolist() for i in range(LENGTH // OWN)]
    assert len({tuple(tokens[0].tolist()) for *_, tokens in extension}) == 8


@pytest.mark.parametrize(("length", "quarter"), [(17, 4), (30, 6), (64, 16)])
@pytest.mark.parametrize("attention", SPANS)
def test_a_query_sees_a_quarter_of_the_length_by_default(home, attention, length, quarter):
    config = ExtendConfig(model=str(home / "model"), length=length, attention=attention, keep_attention=True)
    kept = vars(extended_config(scaled_config(config)[2], config))["subquad"]
    assert kept == {"attention": attention, "options": {SPANS[attention]: quarter}}


def test_the_merged_folder_is_a_plain_model_with_the_adapters_logits(home, capsys):
    assert lora_command.run(["merge", str(home / "run"), "--out", str(home / "merged")]) == 0
    assert f"subquad audit {home / 'merged'}" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(home / "merged")
    assert merged.config.max_position_embeddings == LENGTH
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (home / "merged" / name).read_bytes() == (home / "model" / name).read_bytes()
    original = AutoModelForCausalLM.from_pretrained(home / "model", config=AutoConfig.from_pretrained(home / "run"))
    adapted = PeftModel.from_pretrained(original, home / "run").merge_and_unload()
    tokens = torch.arange(LENGTH)[None]
    assert_exact(merged(input_ids=tokens).logits, adapted(input_ids=tokens).logits)
    assert audit.run([str(home / "run"), *QUICK]) == 0
    assert audit.run([str(home / "merged"), *QUICK]) == 0


def test_an_interrupted_run_ends_as_one_that_was_not(home, monkeypatch, capsys):
    steps = []

    def stop_after_three(self, stopped):
        steps.append(stopped)
        return [len(steps) == 3]

    with monkeypatch.context() as patched:
        patched.setattr(Processes, "any_of", stop_after_three)
        assert extend.run(command(home, "cut", "--run.threads", "1")) == 130
    out, said = capsys.readouterr()
    assert out == ""  # progress is no result
    assert "stopped the extension after step 3 of 4" in said
    assert f"subquad extend --config {home / 'cut' / 'config.yaml'}" in said
    assert not (home / "cut" / "adapter_model.safetensors").is_file()
    assert extend.run(["--config", str(home / "cut" / "config.yaml")]) == 0
    whole, cut = (json.loads((home / name / "report.json").read_text()) for name in ("run", "cut"))
    assert (whole["resumed"], cut["resumed"]) == (False, True)
    assert cut["loss"] == {name: loss for name, loss in whole["loss"].items() if name != "control"}
    assert_same_weights(home / "run", home / "cut", "adapter_model.safetensors")


def test_attention_and_dtype_can_be_kept_in_the_merged_model(home):
    save(home / "half", torch.bfloat16)
    arguments = ("--attention", "llp", "--options.segment", "8", "--keep_attention", "true", "--rope", "ntk")
    assert extend.run(command(home, "kept", *arguments, steps=2, model="half")) == 0
    settings = json.loads((home / "kept" / "config.json").read_text())
    assert settings["subquad"] == {"attention": "llp", "options": {"segment": 8}}
    losses = json.loads((home / "kept" / "report.json").read_text())["loss"]
    pairs = zip(losses["extended"], losses["extended, full attention"], strict=True)
    first, *_, last = (abs(a["loss"] - b["loss"]) for a, b in pairs)
    assert last > 100 * first, "within a segment they are the same, but for rounding"
    assert extended.open_extension(home / "kept").config._attn_implementation == "subquad_llp"
    assert lora_command.run(["merge", str(home / "kept"), "--out", str(home / "kept-merged")]) == 0
    assert json.loads((home / "kept-merged" / "config.json").read_text())["subquad"]["attention"] == "llp"
    weights = load_file(home / "kept-merged" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert audit.run([str(home / "kept-merged"), *QUICK]) == 0


def test_tasks_are_asked_of_the_extended_model(home):
    loaded = load_for_tasks(str(home / "run"), EvalConfig(device="cpu"), {})
    expected = extended.open_extension(home / "run").get_base_model().eval()
    tokens = torch.arange(40)[None]
    assert_exact(loaded.model(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize(("folder", "match"), [("run", "subquad lora merge"), ("model", "subquad import")])
def test_other_commands_say_how_to_get_a_subquad_model(home, capsys, folder, match):
    with pytest.raises(SystemExit):
        main(["generate", str(home / folder), "--prompt", "a"])
    assert match in capsys.readouterr().err


def refused(home, capsys, *arguments, **options):
    return failed(capsys, "extend", *command(home, *arguments, **options))


@pytest.mark.parametrize(("arguments", "said"), [
    (["--attention", "shiftd"], "unknown attention 'shiftd'; did you mean 'shifted'"),
    (["--options.segment", "8"], "attention 'shifted' has no option 'segment'"),
    (["--options.group", "64"], "options.group=64 must be below length=64: otherwise it is full attention"),
    (["--attention", "full", "--options.width", "8"], "attention=full has no options, got ['width']"),
    (["--length", "24", "--control", "true"], "control=true needs a multiple of the model's 16 tokens, got length=24"),
    (["extra"], "unexpected argument 'extra'"),
])  # fmt: skip
def test_impossible_settings_are_refused_before_any_work(home, arguments, said, capsys):
    assert said in refused(home, capsys, "refused", *arguments)
    assert not (home / "refused").exists()


def test_unfit_folders_are_refused(home, monkeypatch, capsys):
    assert "is the model's own folder; choose another one" in refused(home, capsys, "model")
    shutil.copytree(home / "model", home / "wordless")
    (home / "wordless" / "tokenizer.json").unlink()
    message = "wordless holds no tokenizer.json; an extension needs a model and its tokenizer"
    assert message in refused(home, capsys, "new", model="wordless")
    assert "no model: give the folder of a transformers model" in refused(home, capsys, "new", "--model", "")
    with pytest.raises(ValueError, match=r"checkpoint-4: .*extension"):  # the folder holds another run
        extend.run(command(home, "run", "--lora.rank", "2"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process" in refused(home, capsys, "new")


def test_too_little_text_and_too_many_tokens_are_refused_before_training(home):
    (home / "short.txt").write_text("0123456789 " * 40)
    short = ("short", "--data.path", str(home / "short.txt"))
    with pytest.raises(ValueError, match=r"needs 2 stretches of 96 tokens .*the held-out text has"):
        extend.run(command(home, *short))
    assert not (home / "short" / "config.yaml").exists()
    held_out = ("--data.held_out_path", str(home / "text.txt"), "--data.held_out", "0.05")
    with pytest.raises(ValueError, match=r"length=480 exceeds the \d+ tokens of the training text; give more text"):
        extend.run(command(home, *short, "--length", "480", *held_out))
    save(home / "narrow", vocab_size=100)
    with pytest.raises(ValueError, match="the tokenizer has 256 tokens, the model knows 100"):
        extend.run(command(home, "narrow-run", model="narrow"))


def test_a_step_without_memory_is_explained_by_the_settings_of_an_extension(home, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "forward", raising(torch.OutOfMemoryError("out of memory")))
    config = ExtendConfig.from_file(home / "run" / "config.yaml")
    with pytest.raises(
        StepMemoryError, match=r"out of memory in a step of batch\.size=1 windows of 64 tokens \(out of memory\)"
    ):
        extend_model(config.replace(run=config.run.replace(folder=str(home / "memory"))))
