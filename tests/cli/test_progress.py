"""Bars of commands that take long: on a terminal, on standard error alone."""

import io
from contextlib import suppress

import pytest
from rich.console import Console

from subquad.bars import READING, waiting
from subquad.cli import main

LENGTH = ["--prompt", "line", "--max_tokens", "3", "--temperature", "0"]


@pytest.mark.parametrize(("arguments", "bar", "all_of_it"), [
    (["eval", "--windows", "5"], "window", "5/5"),
    (["generate", *LENGTH, "--samples", "2"], "token", "6/6"),
    (["generate", *LENGTH, "--texts", "70", "--out-file", "texts.zip"], "token", "210/210"),
], ids=["eval", "samples", "texts"])  # fmt: skip
def test_a_bar_is_shown_on_a_terminal_and_standard_output_stays_as_it_is(
    trained, tmp_path, monkeypatch, capsys, arguments, bar, all_of_it
):
    def said():
        assert main([arguments[0], str(trained), *arguments[1:]]) == 0
        out, err = capsys.readouterr()
        return [line for line in out.splitlines() if "tokens/s" not in line], err

    monkeypatch.chdir(tmp_path)
    plain, silent = said()
    assert all_of_it not in silent
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    again, shown = said()
    assert again == plain
    assert any(bar in line and all_of_it in line for line in shown.splitlines())
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.mark.parametrize(("arguments", "bar"), [
    (["cost", "--attention", "full,latte", "--context", "2"], "mechanism"),
    (["cost", "--attention", "perceiver", "--layers", "1"], "stack"),
    (["cost", "--recipe", "tiny", "--context", "2"], "length"),
    (["show", "cost", "--attention", "full,latte"], "mechanism"),
    (["show", "reach", "--attention", "full,latte", "--tokens", "8"], "mechanism"),
], ids=["mechanisms", "stacks", "model", "show cost", "show reach"])  # fmt: skip
def test_counting_shows_a_bar(tmp_path, monkeypatch, capsys, arguments, bar):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subquad.evaluation.drawing.save", lambda figure, file: None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    short = [] if "reach" in arguments else ["--tokens", "8", "16"]
    assert main([*arguments, *short]) == 0
    total = 1 if bar == "stack" else 2
    shown = capsys.readouterr().err
    assert any(bar in line and f"{total}/{total}" in line for line in shown.splitlines())
    assert "0/0" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sign_of_waiting_is_shown_on_a_terminal_alone(terminal):
    shown = io.StringIO()
    with waiting("reading the model", Console(file=shown, force_terminal=terminal, width=60)):
        pass
    assert ("reading the model" in shown.getvalue()) == terminal


@pytest.mark.parametrize("command", [
    "eval RUN --windows 1", "generate RUN --prompt line --max_tokens 1", "show weights RUN --text line --out x.png",
    "audit RUN --tokens 8 --repeats 1", "export RUN --out RUN", "list",
], ids=lambda command: command.split()[0])  # fmt: skip
def test_loading_and_reading_are_seen_on_a_terminal_alone(trained, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subquad.evaluation.drawing.save", lambda figure, file: None)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with suppress(SystemExit):  # export writes to no folder that is there
            main([str(trained) if word == "RUN" else word for word in command.split()])
        shown = capsys.readouterr().err
        assert shown.startswith("loading\r       \r") == terminal
        assert (READING in shown) == (terminal and "RUN" in command)
