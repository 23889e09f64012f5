"""The command itself: overview, help, unknown commands, exit statuses, tracebacks."""

import json
import signal
import subprocess
import sys

import pytest

from subquad import program
from subquad.cli import COMMANDS, main
from subquad.cli import train as train_command
from subquad.cli.show import PICTURES

HELP = [[command] for command in COMMANDS] + [["show", what] for what in PICTURES] + [["data", "tokens"]]
HEAVY = ("transformers", "accelerate", "peft", "matplotlib", "fastapi", "prometheus_client")


def fresh(code, *, status=0):
    """Run Python code in a process of its own; return what it wrote to standard output and standard error."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_help_loads_no_torch_for_the_overview_and_nothing_heavier_for_commands():
    code = f"""if True:
        import contextlib, io, json, sys
        from subquad.cli import main
        def loaded(arguments, heavy):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
                assert main([*arguments, "--help"]) == 0
            return [out.getvalue(), [name for name in heavy if name in sys.modules]]
        light = loaded([], ["torch", "numpy", "rich", "jsonargparse", "tokenizers", *{HEAVY}])
        print(json.dumps([light, *(loaded(arguments, {HEAVY}) for arguments in {HELP})]))
    """
    overview, *helps = json.loads(fresh(code)[0])
    assert [modules for _, modules in (overview, *helps)] == [[]] * (1 + len(HELP))
    assert all(f"\n  {command} " in overview[0] for command in COMMANDS)
    for arguments, (text, _) in zip(HELP, helps, strict=True):
        assert text.startswith(f"usage: subquad {' '.join(arguments)}")
    texts = {" ".join(arguments): text for arguments, (text, _) in zip(HELP, helps, strict=True)}
    assert "subquad lora merge RUN" in texts["lora"]
    assert all(f"\n  {what} " in texts["show"] for what in PICTURES)


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "subquad", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.startswith(
        "subquad 0."
    )


FAKE = (  # `list` without torch
    "import os, sys, types; from subquad import cli; cli.COMMANDS['list'] = 'fake'; "
    "sys.modules['subquad.memory'] = types.SimpleNamespace(keep_freed_memory=lambda: None); "
    "sys.modules['fake'] = types.SimpleNamespace(run={run}); sys.exit(cli.main(['list']))"
)


def test_a_crash_of_native_code_shows_where_it_was():
    err = fresh(FAKE.format(run="lambda _: os.abort()"), status=-signal.SIGABRT)[1]
    assert "Fatal Python error: Aborted" in err
    assert "in guarded" in err


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    (tmp_path / "print.py").write_text(FAKE.format(run="lambda _: print('x' * 2**20)"))
    command = f"'{sys.executable}' {tmp_path}/print.py | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(("arguments", "message"), [
    (["trian"], f"unknown command 'trian'; did you mean 'train'? valid: {', '.join(sorted(COMMANDS))}\n"),
    ([], f"no command\nsee {program.command('--help')}\n"),
    (["lora", "lst"], "unknown action 'lst'; did you mean 'list'? valid: list, merge"),
    (["lora"], "no action"),
    (["show", "wieghts"], "unknown picture 'wieghts'; did you mean 'weights'?"),
    (["show"], "no picture named"),
])  # fmt: skip
def test_a_command_that_is_not_there_is_answered_with_the_right_one(capsys, arguments, message):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(("error", "status", "lines"), [
    (ValueError("a value"), 1, ["error: a value"]),
    (TypeError("f() takes 1"), 1, ["error: f() takes 1", "this may be a bug in the program: --debug shows where"]),
    (KeyboardInterrupt(), 130, ["interrupted"]),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 TB\n in C++"), 1,
     ["error: out of memory: DefaultCPUAllocator: can't allocate memory: 4 TB"]),
    (MemoryError(), 1, ["error: out of memory"]),
    (OSError(28, "No space left on device", "a/b"), 1,
     ["error: [Errno 28] No space left on device: 'a/b': free some space and run the same command again"]),
])  # fmt: skip
def test_an_error_is_a_line_and_debug_adds_its_traceback(monkeypatch, capsys, error, status, lines):
    def broken(arguments):
        assert arguments == []
        raise error

    monkeypatch.setattr(train_command, "run", broken)
    assert main(["train"]) == status
    assert capsys.readouterr().err.splitlines() == lines
    assert main(["train", "--debug"]) == status
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (status == 1)
    assert "--debug shows" not in err


def test_an_error_of_the_program_itself_is_not_hidden(monkeypatch):
    monkeypatch.setattr(train_command, "run", lambda arguments: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        main(["train"])


def test_debug_shows_the_traceback_of_a_check_of_the_arguments(capsys, caplog):
    with pytest.raises(SystemExit, match="2"):
        main(["list", "lp", "--debug"])
    assert "Traceback" in caplog.text
    assert capsys.readouterr().err.splitlines()[-2].startswith("error: unknown attention 'lp'")
