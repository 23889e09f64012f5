"""Every command that a command prints runs in the same shell, as it is printed."""

import ast
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import subquad
from subquad.cli import COMMANDS, main
from subquad.data.tokenizers import bytes_tokenizer
from subquad.program import command
from subquad.training import loop
from tests.adaptation import models
from tests.cli.folders import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PROGRAM = re.compile(rf"{re.escape(command())} (.+)$", re.MULTILINE)
SHORT = ["--model.dim", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--run.steps", "2"]
SHORT += ["--schedule.warmup", "0", "--run.eval_windows", "2", "--run.device", "cpu", "--batch.size", "2"]
LLAMA = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True}


@pytest.fixture
def hints(capsys, caplog):
    """Run a command that ends with `status`; return the commands that it prints, as lists of words."""

    def run(*words, status=0):
        caplog.clear()
        capsys.readouterr()
        try:
            ended = main([str(word) for word in words])
        except SystemExit as error:
            ended = error.code
        shown = capsys.readouterr()
        assert ended == status, shown.err
        return [shlex.split(line) for line in PROGRAM.findall(shown.out + shown.err + caplog.text)]

    return run


@pytest.fixture
def follow(hints):
    """Run a command as `hints`, then what it prints, and so on; return the words of all that ran."""

    def run(*words, status=0):
        left, seen = hints(*words, status=status), []
        while left:
            if (line := left.pop(0)) not in seen:
                seen.append(line)
                left += hints(*line)
        return [" ".join(line) for line in seen]

    return run


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A Llama with a tokenizer, in the folder `my llama` of the working directory."""
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained("my llama")
    bytes_tokenizer().save("my llama/tokenizer.json")
    return "my llama"


def test_of_training_and_resuming(tiny, tmp_path, monkeypatch, hints, follow):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as stopped:
        stopped.setattr(loop.StopSignal, "__enter__", lambda self: setattr(self, "received", True) or self)
        config = ["--config", tiny, "--run.folder", "a run", "--run.prompt", "it's "]
        resume = hints("train", *config, status=130)
    assert resume == [["train", "--config", "a run/config.yaml"]]
    ran = follow("generate", "a run", "--prompt", "x", status=2)
    assert ran[:2] == ["train --config a run/config.yaml", "generate --help"]
    assert set(ran[2:]) == {"eval a run", "generate a run --prompt it's "}


def test_of_adapters(trained, tiny, tmp_path, monkeypatch, hints, follow):
    monkeypatch.chdir(tmp_path)
    adapter = ["--lora.base", trained, "--lora.rank", "2", "--run.folder", "adapter"]
    assert "generate adapter --prompt a text é line 115 of a text é line" in follow("train", "--config", tiny, *adapter)
    for refused in (["export", "adapter", "--out", "x"], ["train", "--lora.base", "adapter", "--lora.rank", "2"]):
        assert ["lora", "merge", "adapter", "--out", "adapter-merged"] in hints(*refused, status=2)
    assert follow("lora", "merge", "adapter", "--out", "adapter-merged") == ["eval adapter-merged"]


def test_of_transformers_models(llama, tmp_path, hints, follow):
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i * i}.\n" for i in range(400)))
    ran = follow("generate", llama, "--prompt", "x", status=2)
    assert "generate my llama-imported --prompt Once upon a time" in ran
    text = ["--data.path", "text.txt", "--data.cache", "cache", "--data.held_out", "0.2"]
    steps = ["--run.steps", "1", "--schedule.warmup", "0", "--run.eval_every", "0", "--batch.accumulation", "1"]
    measure = ["--eval.tokens", "64", "--eval.stretches", "2", "--run.folder", "long"]
    merge = ["lora", "merge", "long", "--out", "long-merged"]
    assert hints("extend", llama, "--length", "64", *text, *steps, *measure) == [merge]
    ran = follow("generate", "long", "--prompt", "x", status=2)
    assert ran[:2] == ["lora merge long --out long-merged", "import long-merged --out long-imported"]
    assert {"audit long-merged", "generate long-imported --prompt Once upon a time"} <= set(ran)
    assert hints("extend", "long-imported", "--length", "64", status=2)[0][:2] == ["export", "long-imported"]


def test_of_a_conversion(tmp_path, monkeypatch, hints):
    monkeypatch.chdir(tmp_path)
    original, texts = models.save(tmp_path / "original"), tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(" ".join(models.WORDS[number % 7 :]) * 2)
    few = ["--match.steps", "1", "--lora.steps", "1", "--batch.size", "2", "--batch.length", "16"]
    few += ["--measure.contexts", "[]", "--measure.passkeys", "0", "--options.llp.segment", "8"]
    few += ["--data", texts, "--data.cache", "cache", "--out", "a model"]
    assert hints("convert", original, *few) == [["audit", "a model"]]
    assert hints("audit", "a model", "--tokens", "8", "--long", "0", "--contexts", "[]") == []


def test_of_other_tasks(tmp_path, monkeypatch, follow):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    images = {f"x_{part}": generator.integers(0, 256, (6, 4, 4), dtype=np.uint8) for part in ("train", "test")}
    np.savez("images.npz", **images, y_train=np.arange(6), y_test=np.arange(6))
    probe = ["--recipe", "probe-mqar", "--batch.length", "32", "--probe.pairs", "2", "--probe.held_out", "4"]
    assert follow("train", *probe, *SHORT, "--run.folder", "a probe") == ["probe a probe"]
    assert follow("generate", "a probe", "--prompt", "x", status=2) == ["probe a probe", "generate --help"]
    drawn = ["generate images --images 100", "complete images"]
    image = ["--task", "image", "--image.path", "images.npz", "--image.samples", "2"]
    assert follow("train", *image, *SHORT, "--run.folder", "images") == drawn
    assert follow("generate", "images", "--prompt", "x", status=2) == [drawn[0], "generate --help"]
    classes = ["--recipe", "toy-classify", "--classify.examples", "40", "--classify.held_out", "10"]
    assert follow("train", *classes, "--classify.cache", "cache", *SHORT, "--run.folder", "classes") == []
    assert follow("generate", "classes", "--prompt", "x", status=2) == ["eval classes", "generate --help"]


@pytest.mark.parametrize("words", [["lora", "x"], ["show", "x"], ["show", "cost", "--x"], ["data", "tokens"], ["x"]])
def test_of_wrong_arguments(words, hints):
    (line,) = hints(*words, status=2)
    assert line[-1] == "--help"
    hints(*line)


def test_of_a_recipe(tiny, trained, hints):
    (train, _) = hints("probe", trained, "--task", "mqar", status=2)
    assert train == ["train", "--recipe", "probe-mqar"]
    assert hints(*train, "--print_config") == []


def test_a_prompt_is_a_text_that_the_tokenizer_knows(llama, follow):
    tokenizer = word_tokenizer({"-": 0, "C": 1, "G": 2})
    tokenizer.model.unk_token = "none"
    tokenizer.save(f"{llama}/tokenizer.json")
    assert follow("import", llama, "--out", "dna") == ["generate dna --prompt C"]


def test_no_command_stands_in_a_text_without_the_way_in_which_the_program_was_started():
    """A command after a colon or with a value of this call is one to type; others are names, in backticks."""
    with_value = rf"subquad ({'|'.join(COMMANDS)})( [A-Z]+| --[^\s`]+| merge)* {{}}"
    to_type = re.compile(rf"(?<!usage): subquad |[:;] pip install|{with_value}")
    for file in sorted(Path(subquad.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            assert not to_type.search(text), f"{file.name}, line {node.lineno}: take subquad.program for {text!r}"
