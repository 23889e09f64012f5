"""`python -m experiments.lora_mnist`: repeat the report's LoRA experiment on MNIST as tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields

from experiments.lora_mnist import arms, report, running
from experiments.lora_mnist.config import MnistConfig
from subquad.cli import guarded
from subquad.cli.arguments import Parser, check_output, files_first

NAME = "python -m experiments.lora_mnist"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return guarded(run, sys.argv[1:] if arguments is None else arguments)


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    description = (
        "Repeat the report's LoRA experiment on MNIST and print its tables next to the report's numbers. The same "
        "command continues an interrupted experiment."
    )
    parser = Parser(description=description, prog=NAME, usage=f"{NAME} --path FOLDER [options]")
    parser.add_files()
    parser.add_class_arguments(MnistConfig, None, as_group=False)
    add = parser.add_argument
    add("--out", type=str, default="lora-mnist.json", help="File of the results; an existing one is continued.")
    add("--markdown", type=str | None, default=None, help="Also write the tables to this file.")
    add("--plot", type=str | None, default=None, help="Also draw accuracy over rank to this file (.png, .svg).")
    add("--tune", action="store_true", help="Only choose the learning rates on training images and print them.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Train what is missing and print the tables; return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(files_first(arguments))
    with parser.checking():
        values = parser.instantiate(parsed)
        config = MnistConfig(**{field.name: values[field.name] for field in fields(MnistConfig)})
        for name in ("out", "markdown", "plot"):
            check_output(name, parsed[name])
            if parsed.tune and parsed[name] != parser.get_default(name):
                raise ValueError(f"--{name} has no effect with --tune, which only prints the rates; leave it out")
        if parsed.plot and not parsed.plot.lower().endswith((".png", ".svg")):
            raise ValueError(f"--plot must name a .png or .svg file, got {parsed.plot!r}")
        digits = arms.read_digits(config)
        if parsed.tune:
            arms.held_out(digits, config.tune_held_out)
        else:
            running.Results.open(config, parsed.out, digits.fingerprint)
    if parsed.tune:
        sys.stdout.write(report.rates_yaml(running.tune(config)))
        return 0
    results = running.run(config, parsed.out, digits)
    report.show(results.values, config, parsed.markdown)
    if parsed.plot:
        report.draw(results.values, config, parsed.plot)
    return 0
