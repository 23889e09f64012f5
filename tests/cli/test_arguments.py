"""Configurations from flags and files, and one-line answers to mistakes."""

import importlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest

from subquad import program
from subquad.cli import COMMANDS, main
from subquad.cli.train import NEEDED, make_parser, read_config
from subquad.layers.scaling import RopeScaling
from subquad.recipes import recipe_path, recipes
from subquad.training import TrainConfig


@pytest.mark.parametrize("command", ["train", "eval", "generate", "complete", "convert"])
def test_every_option_has_help(command):
    parser = importlib.import_module(COMMANDS[command]).make_parser()
    helps = {option: action.help for action in parser._actions for option in action.option_strings or [action.dest]}
    assert all(helps.values()), [option for option, text in helps.items() if not text]
    shown = parser.format_help()
    assert "null" in shown
    assert "None" not in shown
    for group in ("model", "data", "batch", "optimizer", "schedule", "run") if command == "train" else ():
        for name in getattr(TrainConfig(), group).to_dict():
            assert f"--{group}.{name}" in helps


def test_the_help_of_train_begins_with_an_example_and_what_most_people_need(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text.txt").write_text("a text")
    shown = make_parser().format_help()
    example, first, *rest = re.split(r"^example:\n|^options[^\n]*:\n", shown, flags=re.MULTILINE)[1:]
    line = example.splitlines()[0].removeprefix(f"  {program.command()} train ")
    assert read_config(line.split()).data.path == "my_text.txt"
    named = re.findall(r"^  (?:--config NAME, )?--([\w.]+)(?!\w| CONFIG)", first, re.MULTILINE)
    assert tuple(named) == NEEDED
    assert len(NEEDED) == 10
    for name in NEEDED:
        assert not re.search(rf"^  --{name} ", "".join(rest), re.MULTILINE), f"{name} is shown twice"
    assert "--model.num_heads" in rest[0]


LLP = {"llp": {"segment": 64, "shifted_heads": True}}
OPTION = "--model.options"


@pytest.mark.parametrize(("files", "flags", "expected"), [
    (["model: {dim: 16, num_layers: 1}"], ["--model.num_layers", "6"],
     {"model.num_layers": 6, "model.dim": 16, "optimizer": TrainConfig().optimizer}),
    (["run: {steps: 500, seed: 3}", "run: {steps: 700}\noptimizer: {lr: 1e-2}"], [],
     {"run.steps": 700, "run.seed": 3, "optimizer.lr": 0.01}),
    ([], ["--data", "texts/"], {"data.path": "texts/"}),
    (["data: {tokenizer: bytes}"], ["--data=texts/"], {"data.path": "texts/", "data.tokenizer": "bytes"}),
    (["data: {tokenizer: bytes}"], ["--data.path", "texts/"], {"data.path": "texts/", "data.tokenizer": "bytes"}),
    ([], [f"{OPTION}.llp.segment", "64", f"{OPTION}.llp.shifted_heads", "true"], {"model.options": LLP}),
    ([], [f"{OPTION}.llp.segment", "64", f"{OPTION}.llp.segment", "32"], {"model.options": {"llp": {"segment": 32}}}),
    ([], [f"{OPTION}.llp.segment", "64", f"{OPTION}.llp", "{shifted_heads: true}"],
     {"model.options": {"llp": {"shifted_heads": True}}}),
    ([], ["--model.attention", "[llp, latte]", f"{OPTION}.llp.segment", "64", f"{OPTION}.latte.num_latents", "3"],
     {"model.attention": ["llp", "latte"], "model.options": {"llp": {"segment": 64}, "latte": {"num_latents": 3}}}),
    (["model: {attention: [llp, latte], options: {llp: {segment: 64}, latte: {num_latents: 5}}}"],
     [f"{OPTION}.llp.shifted_heads", "true"], {"model.options": {**LLP, "latte": {"num_latents": 5}}}),
    *(([], flags, {"run.eval_every": 7})
      for flags in (["--run.eval-every", "7"], ["--run.eval-every=7"], ["--run.eval_every", "7"])),
    ([], [f"{OPTION}.llp.shifted-heads", "true"], {"model.options": {"llp": {"shifted_heads": True}}}),
])  # fmt: skip
def test_flags_win_over_files_wherever_they_stand_and_later_files_over_earlier_ones(
    tmp_path, monkeypatch, files, flags, expected
):
    monkeypatch.setattr("subquad.cli.train._base", lambda *given: [])  # no recipe for a text
    configs = []
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yaml").write_text(text)
        configs += ["--config", str(tmp_path / f"{number}.yaml")]
    for arguments in ([*configs, *flags], [*flags, *configs]):
        config = read_config(arguments)
        assert {name: attrgetter(name)(config) for name in expected} == expected


def test_a_recipe_is_read_by_name_and_long_lists_of_choices_are_cut(refused):
    assert f"and {len(recipes()) - 8} more\n" in refused("train", "--recipe", "stdlib-lp")
    assert read_config(["--recipe", "tiny"]) == TrainConfig.from_file(recipe_path("tiny"))


def test_print_config_prints_what_config_reads(capsys, tiny, tmp_path):
    arguments = ["--config", str(tiny), "--model.dim", "32"]
    with pytest.raises(SystemExit, match="0"):
        main(["train", *arguments, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert TrainConfig.from_file(tmp_path / "printed.yaml") == read_config(arguments)


def test_a_configuration_may_come_from_a_pipe_or_stand_in_the_argument(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        pool.submit((tmp_path / "pipe").write_text, "run: {seed: 71}\n")
        assert read_config(["--config", str(tmp_path / "pipe")]).run.seed == 71
    assert read_config(["--config", '{"run": {"seed": 71}}']).run.seed == 71


def test_a_configuration_that_may_be_null_is_given_whole_or_by_its_parts(refused):
    wanted = RopeScaling(kind="yarn", factor=4.0, original=64)
    whole = read_config(["--model.rope_scaling", "{kind: yarn, factor: 4, original: 64}"])
    kind, factor = "--model.rope_scaling.kind", "--model.rope_scaling.factor"
    parts = read_config([kind, "yarn", factor, "4", "--model.rope_scaling.original", "64"])
    assert whole.model.rope_scaling == parts.model.rope_scaling == wanted
    assert read_config([]).model.rope_scaling is None
    assert "factor=0.5" in refused("train", factor, "0.5")


FULL = ["--attention", "full"]
LATENTS = ["--model.attention", "perceiver_ar", "--model.options.perceiver_ar.latents"]
CONVERT = ["convert", "model", "--out", "folder", "--attention", "llp"]


@pytest.mark.parametrize(("arguments", "match"), [
    (["train", "--model.num_layer", "6"],
     "unknown option 'model.num_layer'; did you mean 'model.num_layers'? valid: model.num_layers, "),
    (["train", "--modle.dim", "6"],
     "unknown option 'modle.dim'; did you mean 'model'? valid: batch, classify, config, data, "),
    (["train", "--run.evil-every", "7"], "unknown option 'run.evil-every'; did you mean 'run.eval_every'?"),
    (["train", "--lr", "0.1"], "unknown option 'lr'; did you mean 'optimizer.lr' or 'pretrain.lr'?\n"),
    (["train", "--tokenizer.kind", "bytes"], "unknown option 'tokenizer.kind'; did you mean 'data.tokenizer'?\n"),
    (["train", "--model.dim", "wide"], "model.dim: Expected a int. Got value: wide\n"),
    (["train", "--run.threads", "None"], "run.threads: Expected a int or null. Got value: None\n"),
    (["generate", "run", "--decode", "None"], "decode must be exact, refill, frozen or null, got 'None'\n"),
    (["generate", "run", "--device", "cuda"], "device must be auto or cpu, got 'cuda'; did you mean 'auto'?\n"),
    (["generate", "run", "--prompt_file", "nowhere"], "there is no file nowhere\n"),
    (["generate", "run", "--no_stream", "--max-tokens=0"], "give one of --prompt TEXT, "),
    (["cost", *FULL, "--options.full.bias", "null"], "bias must be bool, got null\n"),
    (["cost", *FULL, "--options.full.num_kv_heads", "None"], "num_kv_heads must be int | null, got 'None'\n"),
    (["cost", *FULL, "--options.full.rope_scaling", "1"], "rope_scaling must be RopeScaling | null, got 1\n"),
    (["train", "word"], "unexpected argument 'word'\n"),
    (["train", "--config", "nowhere.yaml"], "there is no file nowhere.yaml\n"),
    (["train", "--recipe", "stdlib-lp"], "unknown recipe 'stdlib-lp'; did you mean 'stdlib-llp'? valid: stdlib-llp, "),
    (["train", *LATENTS, "-3"], "latents must be at least 1, got -3"),
    (["train", *LATENTS, "8", "--model.loops", "3"], "perceiver_ar runs its layers once: loops must be 1, got 3"),
    (["train", "--task", "clasify"], "task must be language, classify, pretrain, image or probe, got 'clasify'; did"),
    (["train", "--optimizer.name", "x"], "optimizer.name must be adamw, adam, radam or muon, got 'x'\n"),
    (["train", "--run.prompt="], "run.prompt must "),
    (["train", "--recipe", "stdlib-llp", "--run.steps", "-3"], "run.steps must be at least 1, got -3"),
    *((["train", *task, "--model.dim", "1000000"], "out of memory: ")
      for task in ([], ["--task", "probe"], ["--recipe", "toy-classify"], ["--task", "image", "--image.path", "hf:x"])),
    ([*CONVERT, "--lora.foo", "1"], "unknown option 'lora.foo'; did you mean 'lora.lr'? valid: lora.alpha, "),
    ([*CONVERT, "--lora.rank.foo", "1"], "unknown option 'lora.rank.foo'; did you mean 'lora.rank'? valid: lora.alpha"),
    ([*CONVERT, "--optimizer.lr", "1"], "unknown option 'optimizer.lr'; did you mean 'lora.lr' or 'match.lr'?\n"),
    ([*CONVERT, "--match", "1"], "match: there is no file '1'; valid: match.lr, match.steps, "),
    (["eval", __file__], f"{__file__} is a file; give its folder, {Path(__file__).parent}"),
    (["eval", "nowhere"], "there is no folder nowhere; give the folder of a run"),
    (["eval", "nowhere", "--length", "4", "--stride", "5"], "stride must be at most length (4), so that every token"),
    (["generate", "run", "--prompt", "x", "--temprature=1"], "unknown option 'temprature'; did you mean 'temperature"),
    (["generate", "run", "--prompt", "x", "--max_token", "3"], "unknown option 'max_token'"),  # no abbreviations
    (["cost", "--tokens", "1", "a"], "tokens element 2: Expected a int. Got value: a\n"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(refused, tmp_path, monkeypatch, arguments, match):
    monkeypatch.chdir(tmp_path)
    message = refused(*arguments)
    assert message.startswith(f"error: {match}")
    assert message.count("\n") == 2
    assert message.endswith(f"\nsee {program.command(arguments[0], '--help')}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "match"), [
    ("model: {num_layer: 3}", "unknown option 'model.num_layer'; did you mean 'model.num_layers'? valid: model."),
    ("modle: {num_layers: 3}", "unknown option 'modle.num_layers'; did you mean 'model'? valid: batch, "),
    ("model: {num_layers: many}", "model.num_layers: Expected a int. Got value: many"),
    ("model: {norm: rsm}", "model.norm must be layer, rms, zero_centred_rms or unscaled_layer, got 'rsm'; did you m"),
])  # fmt: skip
def test_a_mistake_in_a_file_names_the_file(refused, tmp_path, text, match):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert refused("train", "--config", file).startswith(f"error: in {file}: {match}")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--data.path", "texst"], "'texst'; did you mean 'texts'? valid: "),
    (["--data.held_out_path", "nowhere"], "'nowhere'; valid: 0.txt, 1.txt, 10.txt, 11.txt, 12.txt, hf:NAME, stdlib\n"),
])  # fmt: skip
def test_a_path_that_is_not_there_is_refused_with_few_of_its_neighbours(
    refused, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("texts", *(f"{number}.txt" for number in range(30))):
        (tmp_path / name).touch()
    assert refused("train", *arguments).startswith(f"error: there is no file or folder {message}")
