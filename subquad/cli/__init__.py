"""The command `subquad`. Each command's module is imported on use, so `subquad --help` doesn't load torch."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from subquad import program
from subquad.checksums import trusting
from subquad.config import suggest
from subquad.disk import FULL
from subquad.extras import needed
from subquad.version import __version__

_HELP = {
    "train": "train a model, evaluate it on held-out data and report",
    "eval": "measure a trained model on a text, or on tasks of lm-evaluation-harness",
    "generate": "continue a prompt, or draw images",
    "complete": "fill in hidden parts of images",
    "serve": "serve a model over HTTP with an OpenAI-compatible API and a web page",
    "audit": "check a language model for leaks from later tokens and for wrong caches",
    "probe": "measure a model's recall: passkey, associative recall, copying, loss by context",
    "data": "make a labelled data set or token shards, and print statistics",
    "lora": "list adapters; merge an adapter into its base",
    "extend": "train a transformers model to read longer contexts (LongLoRA)",
    "import": "convert a transformers or llama2.c model into a subquad model",
    "export": "convert a subquad model into a transformers model",
    "convert": "replace full attention in a trained model by a sub-quadratic mechanism",
    "list": "list attention mechanisms with their options, and recipes",
    "cost": "count score entries, FLOPs and memory of mechanisms and models",
    "show": "draw attention weights, receptive fields, position terms or costs",
    "doctor": "show versions, devices, the backend of each engine, and which extras are missing",
}
_MODULES = {"import": "importing", "export": "exporting", "list": "listing"}
COMMANDS = {name: f"subquad.cli.{_MODULES.get(name, name)}" for name in _HELP}
"""The module of each command. Its `run(arguments)` parses them, does the work and returns the exit status."""
_OWN = {"convert": "peft", "extend": "peft", "lora": "peft", "serve": "serve", "list": None, "doctor": None}
NEEDED = {name: _OWN.get(name, "train") for name in _HELP}
"""The extra that each command needs, or None."""

_LINES = "\n".join(f"  {name:10} {text}" for name, text in _HELP.items())
EVERYWHERE = ("--debug", "--trust-changed")
"""Options of every command."""
OVERVIEW = f"""\
usage: subquad COMMAND [options]

Sub-quadratic attention: train, evaluate and sample long-context language models.

commands:
{_LINES}

examples:
  {program.command("train", "--recipe", "stdlib-llp")}
  {program.command("eval", "runs/stdlib-llp", "--stride", 128)}
  {program.command("generate", "runs/stdlib-llp", "--prompt", "def main(")}

`subquad COMMAND --help` lists the options of a command.
`subquad COMMAND --debug ...` shows the traceback of an error.
`subquad COMMAND --trust-changed ...` reads a model that was edited on purpose.
`subquad --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((argument for argument in arguments if argument not in EVERYWHERE), "")
    if command in ("-h", "--help", "--version"):
        sys.stdout.write(OVERVIEW if command != "--version" else f"subquad {__version__}\n")
        return 0
    if command not in COMMANDS:
        message = f"unknown command {command!r}; {suggest(command, COMMANDS)}" if command else "no command"
        sys.stderr.write(f"error: {message}\nsee {program.command('--help')}\n")
        return 2
    arguments.remove(command)
    return guarded(lambda rest: _run(command, rest), arguments, informs=command in ("train", "extend"))


def _run(command: str, arguments: list[str]) -> int:
    """Import the command's module (and torch) and run it, with the allocator set to keep freed memory."""
    with needed(f"subquad {command}", NEEDED.get(command)):
        with _loading():
            module = importlib.import_module(COMMANDS[command])
            importlib.import_module("subquad.memory").keep_freed_memory()
        return int(module.run(arguments))


@contextmanager
def _loading() -> Iterator[None]:
    """Show `loading` on a terminal within the block, which imports torch for seconds."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write("loading\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write(" " * len("loading") + "\r")


def guarded(run: Callable[[list[str]], int], arguments: Sequence[str], *, informs: bool = False) -> int:
    """Run `run(arguments)` and return its exit status; print an error and return 1, or 130 for an interrupt.

    `EVERYWHERE` is removed from the arguments: `--debug` shows an error's traceback, `--trust-changed` reads models as
    they are. `informs` prints the library's INFO log, not only its warnings.
    """
    debug = "--debug" in arguments
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash in native code prints the stack of each thread
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    first = os.environ.get("RANK", "0") == "0"  # only rank 0 logs
    usual = logging.INFO if informs and first else logging.WARNING
    logging.getLogger("subquad").setLevel(logging.DEBUG if debug else usual)
    rest = [argument for argument in arguments if argument not in EVERYWHERE]
    try:
        with trusting() if "--trust-changed" in arguments else nullcontext():
            status = run(rest)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Discard the rest, or Python would report an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, RuntimeError):
            if not importlib.import_module("subquad.memory").is_out_of_memory(error):
                raise
            text = f"out of memory: {text.splitlines()[0]}"
        if isinstance(error, OSError) and error.errno in FULL:
            text = f"{text}: free some space and run the same command again"
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: {text or 'out of memory'}\n")
        if isinstance(error, TypeError) and not debug:  # wrong arguments have ended in Parser.checking
            sys.stderr.write("this may be a bug in the program: --debug shows where\n")
        return 1
