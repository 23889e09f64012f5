"""The command line: what it reads, what it answers to mistakes, and a whole run."""

import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from subquad import attention
from subquad.cli import COMMANDS, listing, main
from subquad.cli import train as train_command
from subquad.cli.listing import WIDTH
from subquad.cli.train import read_config
from subquad.generation import Generation
from subquad.models.stacks import STACKS
from subquad.recipes import recipes
from subquad.training import TrainConfig

pytestmark = pytest.mark.draws

TINY = {
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "llp", "options": {"llp": {"segment": 16}}},
    "data": {"tokenizer": "bytes"},
    "batch": {"length": 32, "size": 2},
    "schedule": {"warmup": 1},
    "run": {"steps": 3, "log_every": 1, "eval_every": 2, "eval_windows": 2, "sample_tokens": 5, "device": "cpu"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text and a tiny configuration."""
    folder = tmp_path_factory.mktemp("cli")
    lines = [f"line {i} of a text é\n" * (1 + i % 3) for i in range(120)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    tiny = TINY | {"data": {"path": str(folder / "text.txt"), "tokenizer": "bytes", "cache": str(folder / "cache")}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(place) -> Path:
    """The folder of a run that the command made."""
    folder = place / "run"
    assert main(["train", "--config", str(place / "tiny.yaml"), "--run.folder", str(folder)]) == 0
    return folder


def fresh(code: str) -> str:
    """The standard output of Python code in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(capsys, *arguments: str) -> str:
    """The message of a command that ends with status 2, without a traceback."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    return captured.err


# --- the overview


def test_the_overview_loads_nothing_heavy():
    heavy = ("torch", "transformers", "numpy", "rich", "jsonargparse", "tokenizers")
    out = fresh(
        f"import sys; from subquad.cli import main; main(['--help']); print([m for m in {heavy} if m in sys.modules])"
    )
    assert out.endswith("[]\n")
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("command", ["train", "eval", "generate", "complete", "convert", "serve", "audit", "probe"])
def test_the_help_of_a_command_loads_nothing_heavier_than_torch(command):
    out = fresh(
        "import sys\nfrom subquad.cli import main\n"
        f"try:\n    main([{command!r}, '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "else:\n    sys.exit(3)\n"
        "print([m for m in ('transformers', 'accelerate', 'peft', 'matplotlib', 'fastapi') if m in sys.modules])"
    )
    assert out.endswith("[]\n")


@pytest.mark.parametrize("command", ["train", "eval", "generate", "complete", "convert"])
def test_every_option_has_help(command):
    parser = importlib.import_module(COMMANDS[command]).make_parser()
    helps = {option: action.help for action in parser._actions for option in action.option_strings or [action.dest]}
    assert all(helps.values()), [option for option, text in helps.items() if not text]
    for group in ("model", "data", "batch", "optimizer", "schedule", "run") if command == "train" else ():
        for name in getattr(TrainConfig(), group).to_dict():
            assert f"--{group}.{name}" in helps


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("subquad 0.")


def test_an_unknown_command_is_answered_with_the_valid_ones(capsys):
    assert main(["trian"]) == 2
    valid = ", ".join(sorted(COMMANDS))
    assert f"unknown command 'trian'; did you mean 'train'? valid: {valid}" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "new"), [
    (["bench", "ops", "--tokens", "1024"], "`subquad bench` is now `python -m benchmarks`"),
    (["reproduce", "llp_table6"], "`subquad reproduce` is now `python -m experiments`"),
    (["lora", "mnist", "--path", "mnist"], "`subquad lora mnist` is now `python -m experiments.lora_mnist`"),
    (["cost", "--paper=llp"], "`subquad cost --paper` is now `python -m experiments.llp_table6`"),
])  # fmt: skip
def test_a_command_that_needs_a_clone_is_answered_with_its_new_name(capsys, arguments, new):
    assert main(arguments) == 2
    assert f"error: {new}, in a clone of the repository\n" in capsys.readouterr().err


def test_no_command_is_an_error(capsys):
    assert main([]) == 2
    assert "no command\nsee subquad --help" in capsys.readouterr().err


def test_the_module_runs_as_the_command():
    command = [sys.executable, "-m", "subquad", "train", "--config", "nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "there is no file nowhere.yaml" in done.stderr
    assert "Traceback" not in done.stderr


# --- reading a configuration


def test_flags_files_and_defaults_come_together(place):
    config = read_config(["--config", str(place / "tiny.yaml"), "--model.num_layers", "6", "--optimizer.lr", "3e-4"])
    assert (config.model.num_layers, config.model.dim, config.optimizer.lr) == (6, 16, 3e-4)
    assert config.optimizer.weight_decay == TrainConfig().optimizer.weight_decay


def test_flags_win_over_files_wherever_they_stand(place):
    config = read_config(["--model.num_layers", "6", f"--config={place / 'tiny.yaml'}"])
    assert (config.model.num_layers, config.model.dim) == (6, 16)


def test_a_later_file_wins_over_an_earlier_one(place, tmp_path):
    (tmp_path / "more.yaml").write_text("run: {steps: 7}\noptimizer: {lr: 1e-2}\n")
    config = read_config(["--config", str(place / "tiny.yaml"), "--config", str(tmp_path / "more.yaml")])
    assert (config.run.steps, config.optimizer.lr, config.model.dim) == (7, 0.01, 16)


def test_every_recipe_is_read_by_name():
    for name in recipes():
        assert isinstance(read_config(["--recipe", name]), TrainConfig)


@pytest.mark.parametrize("flag", [["--data", "texts/"], ["--data=texts/"], ["--data.path", "texts/"]])
def test_data_alone_is_its_path(flag, place):
    config = read_config([*flag, "--config", str(place / "tiny.yaml")])
    assert (config.data.path, config.data.tokenizer) == ("texts/", "bytes")


def test_options_of_mechanisms_and_hybrids_are_flags():
    config = read_config(["--model.attention", "[llp, full]", "--model.options.llp.segment", "64"])
    assert config.model.attention == ["llp", "full"]
    assert config.model.options == {"llp": {"segment": 64}}


def test_print_config_prints_what_config_reads(capsys, place, tmp_path):
    arguments = ["--config", str(place / "tiny.yaml"), "--model.dim", "32"]
    with pytest.raises(SystemExit) as exit_info:
        main(["train", *arguments, "--print_config"])
    assert exit_info.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert TrainConfig.from_file(tmp_path / "printed.yaml") == read_config(arguments)


# --- mistakes


def test_a_mistyped_flag_is_answered_with_the_valid_ones(capsys):
    message = refused(capsys, "train", "--model.num_layer", "6")
    assert "unknown option 'model.num_layer'; did you mean 'model.num_layers'? valid: model.num_layers, " in message
    assert "more\n" in message
    assert "see subquad train --help" in message


def test_a_mistyped_group_is_answered_with_the_groups(capsys):
    message = refused(capsys, "train", "--modle.dim", "6")
    assert "unknown option 'modle.dim'; did you mean 'model'? valid: batch, classify, config, data, " in message


@pytest.mark.parametrize(("option", "match"), [
    ("--lora.foo", "unknown option 'lora.foo'; did you mean 'lora.lr'? valid: lora.alpha, "),
    ("--lora.rank.foo", "unknown option 'lora.rank.foo'; did you mean 'lora.rank'? valid: lora.alpha, "),
    ("--seed.foo", "unknown option 'seed.foo'; did you mean 'seed'? valid: attention, "),
    ("--optimizer.lr", "unknown option 'optimizer.lr'; did you mean 'lora.lr' or 'match.lr'?\n"),
    ("--match", "match: there is no file '1'; valid: match.lr, match.steps, "),
])  # fmt: skip
def test_an_unknown_option_of_a_group_is_named_with_the_valid_ones(capsys, option, match):
    given = ("convert", "model", "--out", "folder", "--attention", "llp", option, "1")
    assert f"error: {match}" in refused(capsys, *given)


def test_an_option_without_its_group_is_answered_with_its_whole_name(capsys):
    assert "unknown option 'lr'; did you mean 'optimizer.lr' or 'pretrain.lr'?\n" in refused(
        capsys, "train", "--lr", "0.1"
    )
    message = refused(capsys, "train", "--tokenizer.kind", "bytes")
    assert "unknown option 'tokenizer.kind'; did you mean 'data.tokenizer'?\n" in message


def test_a_mistyped_flag_of_another_command_is_answered(capsys):
    message = refused(capsys, "generate", "run", "--prompt", "x", "--temprature=1")
    assert "unknown option 'temprature'; did you mean 'temperature'? valid: " in message


def test_an_abbreviation_is_not_guessed(capsys):
    assert "unknown option 'max_token'" in refused(capsys, "generate", "run", "--prompt", "x", "--max_token", "3")


@pytest.mark.parametrize(("text", "match"), [
    ("model: {num_layer: 3}", "unknown option 'model.num_layer'; did you mean 'model.num_layers'? valid: model."),
    ("modle: {num_layers: 3}", "unknown option 'modle.num_layers'; did you mean 'model'? valid: batch, "),
    ("model: {num_layers: many}", "model.num_layers: Expected a int. Got value: many"),
    ("model: {norm: rsm}", "model.norm must be layer or rms, got 'rsm'; did you mean 'rms'?"),
])  # fmt: skip
def test_a_mistake_in_a_file_names_the_file(capsys, tmp_path, text, match):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refused(capsys, "train", "--config", str(file))
    assert message.startswith(f"error: in {file}: ")
    assert match in message


def test_a_wrong_type_names_the_flag(capsys):
    assert "error: model.dim: Expected a int. Got value: wide" in refused(capsys, "train", "--model.dim", "wide")


def test_an_unexpected_word_is_named(capsys):
    assert "error: unexpected argument 'word'" in refused(capsys, "train", "word")


def test_a_configuration_may_come_from_a_pipe_or_stand_in_the_argument(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        pool.submit((tmp_path / "pipe").write_text, "run: {seed: 71}\n")
        for given in (str(tmp_path / "pipe"), '{"run": {"seed": 71}}'):
            with pytest.raises(SystemExit):
                main(["train", "--config", given, "--print_config"])
            assert "seed: 71\n" in capsys.readouterr().out


def test_a_missing_file_is_named(capsys):
    assert refused(capsys, "train", "--config", "nowhere.yaml").startswith("error: there is no file nowhere.yaml\n")


def test_a_file_option_without_a_name_is_refused(capsys):
    assert "expected one argument" in refused(capsys, "train", "--recipe")


def test_an_unknown_recipe_is_answered_with_the_valid_ones(capsys):
    message = refused(capsys, "train", "--recipe", "stdlib-lp")
    assert "did you mean 'stdlib-llp'? valid: stdlib-llp, " in message
    assert f"and {len(recipes()) - 8} more\n" in message


def test_a_missing_prompt_is_asked_for(capsys):
    assert "prompt" in refused(capsys, "generate", "run")


LATENTS = ["--model.attention", "perceiver_ar", "--model.options.perceiver_ar.latents"]


@pytest.mark.parametrize(("arguments", "match"), [
    (["train", "--model.attention", "lp"], "unknown attention 'lp'; did you mean 'llp'?"),
    (["train", "--model.attention", "linformer"], "attention 'linformer' has no causal form, which --task language"),
    (["train", "--model.attention", "elita", "--model.position", "rope"], "position='rope' needs a layer that rotates"),
    (["train", "--model.options.llp.segments", "3"], "attention 'llp' has no option 'segments'; did you"),
    (["train", "--model.dim", "7"], "dim must be a multiple of num_heads, got dim=7, num_heads=4"),
    (["train", *LATENTS, "-3"], "latents must be at least 1, got -3"),
    (["train", *LATENTS, "8", "--model.loops", "3"], "perceiver_ar runs its layers once: loops must be 1, got 3"),
    (["train", "--task", "classify", "--model.attention", "elita"], "attention 'elita' has no bidirectional form"),
    (["train", "--task", "classify", "--batch.length", "9"], "the toy task needs sequences of at least 15 tokens"),
    (["train", "--task", "clasify"], "task must be language, classify, pretrain, image or probe, got 'clasify'; did"),
    (["train", "--task", "x"], "task must be language, classify, pretrain, image or probe, got 'x'\n"),
    (["train", "--optimizer.name", "x"], "optimizer.name must be adamw, adam, radam or muon, got 'x'\n"),
    (["train", "--run.steps", "0"], "run.steps must be at least 1, got 0"),
    (["train", "--run.max_minutes", "soon"], "run.max_minutes: Expected a float. Got value: soon\n"),
    (["train", "--run.prompt="], "run.prompt must not be empty, got ''"),
    (["eval", "nowhere"], "there is no folder nowhere; give the folder of a run"),
    (["eval", "nowhere", "--stride", "a"], "stride: Expected a int. Got value: a\n"),
    (["eval", "nowhere", "--stride", "0"], "stride must be at least 1, got 0"),
    (["eval", "nowhere", "--windows", "0"], "windows must be at least 1, got 0"),
    (["eval", "nowhere", "--length", "4", "--stride", "5"], "stride must be at most length (4), so that no token"),
    (["generate", "nowhere", "--prompt", "x"], "there is no folder nowhere; give the folder of a run"),
    (["generate", "nowhere", "--prompt", "x", "--top_k", "0"], "top_k must be at least 1, got 0"),
    (["cost", "--attention", "lp"], "unknown attention 'lp'; did you mean 'llp'?"),
    (["cost", "--tokens", "1", "a"], "tokens element 2: Expected a int. Got value: a\n"),
    (["cost", "latte"], "there is no folder latte; give the folder of a run, as `subquad train` makes it; "
     "mechanism? use --attention latte\n"),
    (["list", "lp"], "unknown attention 'lp'; did you mean 'llp'?"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2_wherever_they_are_found(
    capsys, tmp_path, monkeypatch, arguments, match
):
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, *arguments)
    assert message.startswith(f"error: {match}")
    assert message.count("\n") == 2
    assert message.splitlines()[-1] == f"see subquad {arguments[0]} --help"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "message"), [
    (["--data.path", "texst"], "there is no file or folder 'texst'; did you mean 'texts'? valid: "),
    (["--data.held_out_path", "nowhere"], "there is no file or folder 'nowhere'; valid: 0.txt, 1.txt, 10.txt, 11.txt, "
     "12.txt, hf:NAME, stdlib\n"),
    (["--task", "image", "--image.path", "nowhere"], "there is no file or folder 'nowhere'; valid: 0.txt, "),
    (["--task", "classify", "--classify.dataset", "text", "--classify.path", "nowhere"],
     "there is no file or folder 'nowhere'; valid: 0.txt, "),
])  # fmt: skip
def test_a_path_that_is_not_there_is_refused_with_few_of_its_neighbours(
    capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("texts", *(f"{number}.txt" for number in range(30))):
        (tmp_path / name).touch()
    assert refused(capsys, "train", *arguments).startswith(f"error: {message}")


def test_a_text_that_is_none_is_a_failure_of_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\0")
    assert main(["train", "--data.path", "bad.txt"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("error: bad.txt is not text: it has a NUL at byte 0")
    assert "Traceback" not in captured.err


def test_a_type_error_that_is_no_arguments_fault_points_to_debug(monkeypatch, capsys):
    def broken(arguments):
        raise TypeError("f() takes 1 positional argument but 2 were given")

    monkeypatch.setattr(train_command, "run", broken)
    assert main(["train"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: f() takes 1 positional argument but 2 were given",
        "this may be a mistake in the program: --debug shows where",
    ]
    assert main(["train", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "--debug" not in err


@pytest.mark.parametrize(("content", "match"), [
    (b"", "is empty: there is no text to read"),
    (b"text\0more", "is not text: it has a NUL at byte 4"),
    (b"text\xff", "is not text: byte 4 is 0xff, which is not valid UTF-8"),
])  # fmt: skip
def test_bad_text_is_one_line(capsys, tmp_path, content, match):
    (tmp_path / "bad.txt").write_bytes(content)
    arguments = [
        "--data.path",
        str(tmp_path / "bad.txt"),
        "--data.cache",
        str(tmp_path),
        "--run.folder",
        str(tmp_path / "run"),
    ]
    assert main(["train", *arguments]) == 1
    captured = capsys.readouterr()
    assert f"{tmp_path / 'bad.txt'} {match}" in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err


def test_a_loss_that_is_not_finite_is_one_line(capsys, place):
    arguments = ["--config", str(place / "tiny.yaml"), "--optimizer.lr", "1e30", "--run.steps", "9"]
    assert main(["train", *arguments, "--run.folder", str(place / "diverged")]) == 1
    captured = capsys.readouterr()
    assert re.match(r"error: the (loss|gradient norm) is (nan|inf) at step \d", captured.err.splitlines()[-1])
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"\0")
    assert main(["train", "--data.path", "bad.txt", "--debug"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.endswith(f"error: {captured.err.splitlines()[-1].removeprefix('error: ')}\n")


def test_debug_shows_the_traceback_of_a_check_of_the_arguments():
    command = [sys.executable, "-m", "subquad", "list", "lp", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-2].startswith("error: unknown attention 'lp'")


def test_an_error_of_the_program_itself_is_not_hidden(monkeypatch):
    def broken(arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_command, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])


def test_a_crash_of_native_code_shows_where_it_was():
    code = (
        "import os, sys, types; from subquad import cli; "
        "sys.modules['crash'] = types.SimpleNamespace(run=lambda arguments: os.abort()); "
        "cli.COMMANDS['list'] = 'crash'; cli.main(['list'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in guarded" in done.stderr


def test_an_interruption_has_its_status(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "run", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# --- a whole run


def test_train_leaves_all_that_it_printed(trained, capsys):
    report = json.loads((trained / "report.json").read_text())
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert report["bits_per_byte"] == evaluation["bits_per_byte"]
    assert 0 < report["gzip_bits_per_byte"] < 8
    assert evaluation["text_bytes"] == evaluation["tokens"] + 1  # bytes are the tokens
    samples = (trained / "samples.txt").read_text()
    assert samples.count("--- ") == 3
    assert samples.count("import ") == 3
    for name in ("config.yaml", "metrics.jsonl", "model.safetensors", "tokenizer.json", "curves.png"):
        assert (trained / name).stat().st_size > 0


def test_the_printed_table_has_the_numbers(place, capsys):
    arguments = ["--config", str(place / "tiny.yaml"), "--run.folder", str(place / "second")]
    assert main(["train", *arguments]) == 0
    out = capsys.readouterr().out
    for part in ("gzip -9", "xz -9e", "bits per byte", "state after 100,000 tokens", "tokens/s", "whitespace word"):
        assert part in out
    assert "--- greedy\nimport " in out


def test_samples_end_where_learned_positions_do(place, capsys, caplog):
    learned = ["--model.position", "learned", "--model.max_positions", "200", "--run.sample_tokens", "300"]
    folder = place / "learned"
    assert main(["train", "--config", str(place / "tiny.yaml"), *learned, "--run.folder", str(folder)]) == 0
    assert "samples have 194 tokens: the table of positions has 200 rows" in caplog.text
    assert len((folder / "samples.txt").read_text().split("---")) == 4


def test_a_short_table_of_positions_is_enough_for_all_that_a_run_reports(place, capsys, caplog):
    learned = ["--model.position", "learned", "--model.max_positions", "32", "--run.prompt", "a long prompt " * 4]
    folder = place / "short table"
    assert main(["train", "--config", str(place / "tiny.yaml"), *learned, "--run.folder", str(folder)]) == 0
    assert "samples have 1 tokens: the table of positions has 32 rows" in caplog.text
    assert json.loads((folder / "report.json").read_text())["decode_tokens_per_second"] > 0


def test_the_folder_of_a_run_repeats_it(trained, place):
    again = place / "again"
    assert main(["train", "--config", str(trained / "config.yaml"), "--run.folder", str(again)]) == 0
    one, two = (load_file(folder / "model.safetensors") for folder in (trained, again))
    assert all(one[name].equal(two[name]) for name in one)


def test_a_run_that_had_ended_is_reported_again_with_its_speed(trained, capsys):
    before = json.loads((trained / "report.json").read_text())
    assert main(["train", "--config", str(trained / "config.yaml")]) == 0
    after = json.loads((trained / "report.json").read_text())
    assert after["train_tokens_per_second"] > 0
    assert after["bits_per_byte"] == before["bits_per_byte"]


def test_an_interrupted_run_says_how_to_go_on(place, capsys, monkeypatch):
    from subquad.training import loop

    monkeypatch.setattr(loop.StopSignal, "__enter__", lambda self: setattr(self, "received", True) or self)
    folder = place / "stopped run"
    assert main(["train", "--config", str(place / "tiny.yaml"), "--run.folder", str(folder)]) == 130
    assert f"stopped after step 1 of 3; go on with:\n  subquad train --config '{folder}/config.yaml'" in (
        capsys.readouterr().err
    )
    monkeypatch.undo()
    capsys.readouterr()
    message = f"its training has not ended; go on with: subquad train --config {folder / 'config.yaml'}"
    assert message in refused(capsys, "generate", str(folder), "--prompt", "x")
    assert main(["train", "--config", str(folder / "config.yaml")]) == 0
    assert json.loads((folder / "report.json").read_text())["steps"] == 3


def test_eval_repeats_the_evaluation_of_the_run(trained, tmp_path, capsys):
    assert main(["eval", str(trained), "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    before = json.loads((trained / "evaluation.json").read_text())
    assert {k: v for k, v in result.items() if k != "seconds"} == {k: v for k, v in before.items() if k != "seconds"}
    out = capsys.readouterr().out
    assert "tokens of context" in out
    assert "16 to 31" in out


def test_eval_reads_a_checkpoint_of_a_run(trained, tmp_path, capsys):
    checkpoint = trained / "checkpoints" / "checkpoint-3"
    assert main(["eval", str(checkpoint), "--json", str(tmp_path / "result.json")]) == 0
    last = json.loads((trained / "evaluation.json").read_text())
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == last["loss"]


def test_eval_reads_the_whole_of_another_text(trained, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("another text, é\n" * 9, encoding="utf-8")
    result = tmp_path / "result.json"
    arguments = ["--data", str(tmp_path / "other.txt"), "--data.cache", str(tmp_path), "--json", str(result)]
    assert main(["eval", str(trained), *arguments, "--length", "16", "--stride", "4"]) == 0
    values = json.loads(result.read_text())
    assert (values["text_bytes"], values["words"], values["tokens"]) == (17 * 9, 27, 17 * 9 - 1)
    assert (values["length"], values["stride"]) == (16, 4)
    assert main(["eval", str(trained), *arguments, "--length", "16", "--windows", "2"]) == 0
    values = json.loads(result.read_text())
    assert (values["tokens"], values["text_bytes"]) == (32, 33)


def test_eval_says_that_a_text_has_crlf_line_ends(trained, tmp_path, caplog, capsys):
    text = "def main():\n    return 0\n" * 60
    for name, ends in (("unix", "\n"), ("dos", "\r\n")):
        (tmp_path / name).write_bytes(text.replace("\n", ends).encode())
        for _ in range(2):  # the second time its tokens are kept
            caplog.clear()
            arguments = ["--data.path", str(tmp_path / name), "--data.cache", str(tmp_path)]
            assert main(["eval", str(trained), *arguments]) == 0
            assert ("has CRLF line ends (120 carriage returns)" in caplog.text) == (name == "dos")


def test_eval_needs_a_text_where_the_folder_names_none(trained, tmp_path, capsys):
    bare = copy_of(trained, tmp_path / "bare", "config.json", "model.safetensors", "tokenizer.json")
    assert f"{bare} has no config.yaml that names its text; give one by --data.path" in refused(
        capsys, "eval", str(bare)
    )


def test_eval_refuses_the_text_of_another_tokenizer(trained, tmp_path, capsys):
    folder = copy_of(trained, tmp_path / "changed", "config.json", "model.safetensors", "tokenizer.json", "config.yaml")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["data"] |= {"tokenizer": "bpe", "vocab_size": 260}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["eval", str(folder)]) == 1
    assert "it gives another tokenizer; give a text by --data.path" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "match"), [
    ("config.json", "holds no config.json, so no trained model; give the folder of a run"),
    ("tokenizer.json", "holds no tokenizer.json; copy the one that the model was trained with there"),
])  # fmt: skip
def test_a_folder_that_lacks_a_file_says_which(trained, tmp_path, capsys, missing, match):
    files = {"config.json", "model.safetensors", "tokenizer.json"} - {missing}
    folder = copy_of(trained, tmp_path / "part", *files)
    assert match in refused(capsys, "generate", str(folder), "--prompt", "x")


def copy_of(folder: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for name in names:
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def test_generate_prints_the_prompt_and_what_follows(trained, capsys):
    arguments = ["generate", str(trained), "--prompt", "line é", "--max_tokens", "40", "--seed", "3"]
    assert main(arguments) == 0
    streamed = capsys.readouterr()
    assert main([*arguments, "--no-stream"]) == 0
    whole = capsys.readouterr()
    assert streamed.out == whole.out
    assert streamed.out.startswith("line é")
    assert "prompt: 7 tokens" in streamed.err
    assert "generated: 40 tokens" in streamed.err
    assert "bytes\n" in streamed.err


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_generate_streams_while_it_generates(trained, monkeypatch, how):
    """What is printed grows from token to token, or with `--no-stream` only at the end."""
    plain, shown, out = Generation.__next__, [], io.StringIO()

    def watched(self: Generation) -> int:
        shown.append(len(out.getvalue()))
        return plain(self)

    monkeypatch.setattr(Generation, "__next__", watched)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(trained), "--prompt", "line", "--max_tokens", "30", "--seed", "0", how]) == 0
    if how == "--stream":
        assert len(set(shown)) > 10
    else:
        assert set(shown) == {len("line")}


def test_generate_reads_the_prompt_from_standard_input(trained, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("line 7"))
    assert main(["generate", str(trained), "--prompt", "-", "--max_tokens", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("line 7")


def test_generate_refuses_an_empty_prompt(trained, capsys):
    message = refused(capsys, "generate", str(trained), "--prompt", "")
    assert "the prompt must hold at least one token, got an empty text" in message


def test_a_reader_that_goes_away_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m subquad list --recipes | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "1\n"
    assert done.stderr == ""


# --- lists


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def test_lists_keep_to_the_columns_that_are_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    for arguments in (["list"], ["list", "perceiver_ar"], ["list", "--recipes"]):
        assert main(arguments) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.parametrize("name", [*attention.names(), *STACKS])
def test_without_a_width_only_explanations_are_wrapped(capsys, name):
    from subquad.cli.listing import options

    assert main(["list", name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    own = STACKS[name].options if name in STACKS else attention.mechanism(name).Config
    for option in options(own):
        assert re.search(rf"^ {option.name} +{re.escape(option.type)} +{re.escape(option.default)} ", out, re.MULTILINE)


def test_list_shows_mechanisms_and_recipes(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in attention.names():
        assert f" {attention.mechanism(name).paper} " in out
    assert all(name in out for name in recipes())


def test_list_recipes_shows_only_recipes(capsys):
    assert main(["list", "--recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipes())
    assert "arXiv" not in out


@pytest.mark.parametrize("name", attention.names())
def test_list_shows_every_option_of_a_mechanism_with_help(capsys, name):
    from subquad.cli.listing import options

    assert main(["list", name]) == 0
    out = capsys.readouterr().out
    for option in options(attention.mechanism(name).Config):
        assert option.help, f"{name}.{option.name} has no docstring"
        assert option.name in out
        assert option.help[:20] in out


def test_list_markdown_is_a_row_a_mechanism(capsys):
    assert main(["list", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [line.split("|")[1].strip() for line in rows] == [f"`{name}`" for name in [*attention.names(), *STACKS]]
    assert len({line.count("|") for line in lines[:2] + rows}) == 1
    assert lines[-1].startswith("*state: of one layer")


@pytest.mark.parametrize("name", STACKS)
def test_list_shows_every_option_of_a_stack(capsys, name):
    assert main(["list", name]) == 0
    out = capsys.readouterr().out
    assert STACKS[name].paper in out
    assert all(field.name in out for field in dataclasses.fields(STACKS[name].options))


def test_list_of_an_unknown_name_gives_the_valid_ones(capsys):
    message = refused(capsys, "list", "perciever")
    assert "unknown attention 'perciever'; did you mean 'perceiver'? valid: bigbird" in message


def test_list_laws_is_a_row_a_form_with_the_reasons_below(capsys, monkeypatch):
    assert main(["list", "--laws"]) == 0
    out = capsys.readouterr().out
    cells = [line.split() for line in out.splitlines()]
    assert any(row[:1] == ["TestShiftedAsPublished"] and " ".join(row[1:9]) == "1 2 6 10 11 12 13 14" for row in cells)
    monkeypatch.setattr(listing, "TESTS", listing.TESTS / "absent")
    assert main(["list", "--laws"]) == 0
    assert "`make test-long` tests the rest (tests/attention in the repository)." in capsys.readouterr().out
    assert ["latte", "causal", *["yes"] * 15] in cells
    assert ["latte", "bidirectional", "yes", "yes", "-", "-", "-", "yes", "yes", "yes", "-", *["yes"] * 6] in cells
    assert ["shifted", "wrap=True", "yes", "yes", "-", "-", "-", "yes", "-", "-", "-", *["yes"] * 5, "-"] in cells
    assert "laws 3, 4, 5, 9: wrap=True leaks the last tokens" in out
    assert "bidirectional, law 15: bidirectional: each sequence hands on a memory of its own" in out
    assert "bidirectional, law 9: bidirectional: a token sees later ones" in out
    assert "stacks, law 1: a stack of layers" in out
    assert all(text in out for text in attention.LAWS.values())
    assert all(f" {name} " in out for name in [*attention.names(), *STACKS])


def test_a_configuration_that_may_be_null_is_given_whole_or_by_its_parts(place, capsys):
    from subquad.layers.scaling import RopeScaling

    tiny = ["--config", str(place / "tiny.yaml")]
    wanted = RopeScaling(kind="yarn", factor=4.0, original=64)
    whole = read_config([*tiny, "--model.rope_scaling", "{kind: yarn, factor: 4, original: 64}"])
    kind, factor = "--model.rope_scaling.kind", "--model.rope_scaling.factor"
    parts = read_config([*tiny, kind, "yarn", factor, "4", "--model.rope_scaling.original", "64"])
    assert whole.model.rope_scaling == parts.model.rope_scaling == wanted
    assert read_config(tiny).model.rope_scaling is None
    assert "factor=0.5" in refused(capsys, "train", *tiny, factor, "0.5")
