"""Command-line parsers for configuration dataclasses: a field's docstring is the help of its option."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import jsonargparse
import yaml

from subquad.cli.parser import PlainParser
from subquad.config import Config, read_mapping
from subquad.parsing import BoundsError, check_yaml
from subquad.recipes import recipe_path

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
_load_yaml = jsonargparse.get_loader("yaml")


def _load_bounded(text: str) -> Any:
    """Load YAML as jsonargparse does, but refuse values so deep that they crash the process or exhaust memory."""
    try:
        _check_bounds(text, "the value")
    except BoundsError as error:
        raise yaml.YAMLError(str(error)) from error
    return _load_yaml(text)


def _check_bounds(text: str, where: str) -> None:
    """Raise `BoundsError` as `check_yaml` does; ignore text that isn't YAML."""
    try:
        check_yaml(text, where)
    except BoundsError:
        raise
    except ValueError:
        return


jsonargparse.set_loader("yaml", _load_bounded, exceptions=(yaml.YAMLError,))

Made = TypeVar("Made", bound=Config)
FILES = ("--config", "--recipe")
SHORT = {"data": ("path", "PATH"), "pretrain": ("kind", "KIND")}
"""Groups with a short form: `--data PATH` means `--data.path PATH`."""
RUN_HELP = (
    "Folder of a subquad model: a run, one of its checkpoints, a LoRA adapter (which finds its base), or what subquad "
    "import, convert or lora merge wrote. `subquad import` first makes one of another transformers model, such as that "
    "of a merged extension."
)
"""Help of the folder in commands that load it by `training.runs`."""


class Parser(PlainParser, jsonargparse.ArgumentParser):
    """A parser with an option for each field of a configuration, which files set too."""

    def add_files(self) -> None:
        """Add `--config FILE` and `--recipe NAME`."""
        help_text = "Start from a YAML or JSON file, or from a recipe that `subquad list --recipes` names; options win."
        self.add_argument(*FILES, action=_File, metavar="NAME", help=help_text)

    def add_config(self, config: type[Any]) -> None:
        """Add an option for each field of `config`, and the short forms of `SHORT`."""
        self.add_class_arguments(config, None, as_group=False)
        for action in self._actions:
            group = action.option_strings[0].removeprefix("--") if len(action.option_strings) == 1 else ""
            if group in SHORT:
                option, action.metavar = SHORT[group]
                action.help = f"Short for --{group}.{option} {action.metavar}."
            elif action.dest.endswith(".position"):
                action.default = "auto"  # the default configuration has resolved it for its own mechanism
            elif action.dest == "options" or action.dest.endswith(".options"):
                _add_up(action)

    def begin_with(self, example: str, title: str, names: Sequence[str]) -> None:
        """Begin the help with an example and, under a title, the options `names`, which leave their groups."""
        self.example = example
        first = self.add_argument_group(title)
        groups: Any = self._action_groups
        groups.insert(0, groups.pop())
        for name in names:
            action = self._option_string_actions[f"--{name}"]
            for group in groups:
                if action in group._group_actions:
                    group._group_actions.remove(action)
            first._group_actions.append(action)

    def add_options(self, help_text: str) -> None:
        """Add `--options.NAME.OPTION VALUE`."""
        _add_up(self.add_argument("--options", type=dict[str, dict[str, Any]], default={}, help=help_text))

    def add_optional(self, name: str, help_text: str, kind: Any = str) -> None:
        """Add an option or positional argument that defaults to None."""
        given: dict[str, Any] = {} if name.startswith("--") else {"nargs": "?"}
        self.add_argument(name, type=kind | None, default=None, help=help_text, **given)

    def add_yes_no(self, name: str, help_text: str) -> None:
        """Add `--name` (the default) and `--no-name`."""
        self.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=help_text)

    def add_device(self) -> None:
        """Add `--device`."""
        help_text = "auto: a GPU if PyTorch finds one; cpu: always the CPU."
        self.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=help_text)

    def made(self, config: type[Made], parsed: Any) -> Made:
        """Return the `config` whose fields `add_config` added, with the parsed values."""
        values = self.instantiate(parsed)
        return config(**{field.name: values[field.name] for field in dataclasses.fields(config)})


class _File(jsonargparse.ActionConfigFile):
    """The action of `--config FILE` and `--recipe NAME`."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if option_string == "--recipe":
            try:
                values = str(recipe_path(values))
            except ValueError as error:
                parser.error(str(error))
        path = Path(values)
        if not path.exists() and "{" not in values:  # jsonargparse also accepts the content, as JSON
            parser.error(f"there is no file {values}")
        parser.files.append(values)
        parser.reading = values
        if path.is_file():  # a pipe can be read once
            with parser.checking():
                _check_file(values)
        super().__call__(parser, cfg, values, option_string)
        parser.reading = None


def _check_file(file: str) -> None:
    """Raise `ValueError` for a file that isn't a mapping or that holds a string too deep for jsonargparse to parse."""
    left: list[Any] = [read_mapping(file)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            _check_bounds(value, file)


def _add_up(action: argparse.Action) -> None:
    """Make `--options.NAME.OPTION VALUE` add to NAME's options, which jsonargparse would replace."""
    replacing: Any = type(action)

    class Adding(replacing):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not args:
                return super().__call__(**kwargs)
            parser, cfg, value, flag = args
            before = dict(cfg.get(self.dest) or {})
            super().__call__(parser, cfg, value, flag)
            name, _, option = flag.removeprefix(self.option_strings[0]).removeprefix(".").partition(".")
            if option:
                cfg[self.dest][name] = {**before.get(name, {}), **cfg[self.dest][name]}
            return None

    action.__class__ = Adding


def data_is_a_path(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the short forms of `SHORT` written out, such as `--data PATH` as `--data.path PATH`."""
    groups = "|".join(SHORT)
    return [re.sub(rf"^--({groups})(?==|$)", lambda m: f"--{m[1]}.{SHORT[m[1]][0]}", text) for text in arguments]


def check_output(name: str, file: str | None) -> None:
    """Raise `ValueError` or `FileNotFoundError`, before any work, if the file of `--name` can't be written."""
    if file is None:
        return
    if not file or Path(file).is_dir():
        raise ValueError(f"--{name} must be a file, got {file!r}")
    if not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(file).absolute().parent} for --{name}")


def picture_file(asked: str | None, default: Path) -> Path:
    """Return the file for a picture; `ValueError` unless it is a .png, `FileNotFoundError` if its folder is missing."""
    if asked is None:
        return default
    if Path(asked).suffix.lower() != ".png" or Path(asked).is_dir():
        raise ValueError(f"--out must name a .png file, got {asked!r}")
    check_output("out", asked)
    return Path(asked)


def files_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--config` and `--recipe` first, so that options win wherever they stand."""
    files, rest = [], []
    left = iter(arguments)
    for argument in left:
        if argument in FILES:
            files += [argument, *islice(left, 1)]
        elif argument.startswith(tuple(f"{name}=" for name in FILES)):
            files.append(argument)
        else:
            rest.append(argument)
    return files + rest
