"""Calls of commands in this process, their refusals, and one tiny trained run."""

import pytest
import yaml

from subquad.cli import main

TINY = {
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "llp", "options": {"llp": {"segment": 16}}},
    "batch": {"length": 32, "size": 2},
    "schedule": {"warmup": 1},
    "run": {"steps": 3, "log_every": 1, "eval_every": 2, "eval_windows": 2, "sample_tokens": 5, "device": "cpu"},
}


@pytest.fixture
def printed(capsys):
    """Run a command that has to succeed; return what it writes to standard output."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Run a command that has to end with status 2, without output or traceback; return its message."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "Traceback" not in shown.err
        return shown.err

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The configuration file of a tiny training on a text beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    lines = [f"line {i} of a text é\n" * (1 + i % 3) for i in range(120)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    data = {"path": str(folder / "text.txt"), "tokenizer": "bytes", "cache": str(folder / "cache")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": data}), encoding="utf-8")
    return folder / "tiny.yaml"


@pytest.fixture(scope="session")
def trained(tiny):
    """The folder of a run that `subquad train` made."""
    folder = tiny.with_name("run")
    assert main(["train", "--config", str(tiny), "--run.folder", str(folder)]) == 0
    return folder
