"""The command `subquad`. A command's modules load when the command is named: `subquad --help` loads no torch."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from subquad.config import suggest
from subquad.version import __version__

COMMANDS = {
    "train": "subquad.cli.train",
    "eval": "subquad.cli.eval",
    "generate": "subquad.cli.generate",
    "complete": "subquad.cli.complete",
    "serve": "subquad.cli.serve",
    "audit": "subquad.cli.audit",
    "probe": "subquad.cli.probe",
    "data": "subquad.cli.data",
    "lora": "subquad.cli.lora",
    "extend": "subquad.cli.extend",
    "import": "subquad.cli.importing",
    "export": "subquad.cli.exporting",
    "convert": "subquad.cli.convert",
    "list": "subquad.cli.listing",
    "cost": "subquad.cli.cost",
    "show": "subquad.cli.show",
}
"""The module of each command: its `run(arguments)` parses them, does the work and returns the exit status."""

MOVED = {
    ("bench",): "python -m benchmarks",
    ("reproduce",): "python -m experiments",
    ("lora", "mnist"): "python -m experiments.lora_mnist",
    ("cost", "--paper"): "python -m experiments.llp_table6",
}
"""Commands that need a clone of the repository, by their old names."""

OVERVIEW = """\
usage: subquad COMMAND [options]

Sub-quadratic attention: train, evaluate and sample long-context language models.

commands:
  train      train a model, evaluate it on held-out text, sample, report
  eval       measure a trained model on a text, or on tasks of lm-evaluation-harness
  generate   continue a prompt, or draw images
  complete   draw the occluded part of images
  serve      answer over HTTP in OpenAI's form, with a page to try it
  audit      check a language model for leaks, wrong caches, padding, growth
  probe      what models remember: passkey, recall, copying, loss by context
  data       make or open a labelled data set, and say what is in it
  lora       adapters: list, merge
  extend     give a model of transformers longer reach (LongLoRA)
  import     a model of transformers or llama2.c as one of ours
  export     a model of ours as one of transformers
  convert    replace full attention in a trained model
  list       the attention mechanisms, their options, the recipes
  cost       what mechanisms and models cost: score entries, FLOPs, memory
  show       pictures: weights, reach, positions, cost

  subquad train --recipe stdlib-llp
  subquad eval runs/stdlib-llp --stride 128
  subquad generate runs/stdlib-llp --prompt "def main("

`subquad COMMAND --help` lists the options of a command. With `--debug` an error shows its traceback.
`subquad --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((argument for argument in arguments if argument != "--debug"), "")
    given = {argument.partition("=")[0] for argument in arguments}
    for old, new in MOVED.items():
        if command == old[0] and given >= set(old):
            sys.stderr.write(f"error: `subquad {' '.join(old)}` is now `{new}`, in a clone of the repository\n")
            return 2
    if command in ("-h", "--help", "--version"):
        sys.stdout.write(OVERVIEW if command != "--version" else f"subquad {__version__}\n")
        return 0
    if command not in COMMANDS:
        message = f"unknown command {command!r}; {suggest(command, COMMANDS)}" if command else "no command"
        sys.stderr.write(f"error: {message}\nsee subquad --help\n")
        return 2
    arguments.remove(command)
    return guarded(lambda rest: _run(command, rest), arguments, informs=command in ("train", "extend"))


def _run(command: str, arguments: list[str]) -> int:
    """Load the command's module, which loads torch, and run it in a process that keeps freed memory."""
    module = importlib.import_module(COMMANDS[command])
    importlib.import_module("subquad.memory").keep_freed_memory()
    return int(module.run(arguments))


def guarded(run: Callable[[list[str]], int], arguments: Sequence[str], *, informs: bool = False) -> int:
    """Run `run(arguments)`; returns its exit status, or 1 for an error, which is printed, and 130 for an interrupt.

    `--debug` among the arguments, which `run` does not get, shows an error's traceback. With `informs` the library's
    information is printed, not its warnings alone.
    """
    debug = "--debug" in arguments
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash of native code shows where each thread was
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    first = os.environ.get("RANK", "0") == "0"  # of several processes one is enough to hear from
    usual = logging.INFO if informs and first else logging.WARNING
    logging.getLogger("subquad").setLevel(logging.DEBUG if debug else usual)
    rest = [argument for argument in arguments if argument != "--debug"]
    try:
        status = run(rest)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`): what is left goes nowhere, or Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        if isinstance(error, TypeError) and not debug:  # those of configurations end with status 2, in Parser.checking
            sys.stderr.write("this may be a mistake in the program: --debug shows where\n")
        return 1
