"""Command-line parsers over the configuration dataclasses: a field's docstring is its flag's help."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import jsonargparse
import yaml

from subquad.config import Config, read_mapping, suggest
from subquad.parsing import BoundsError, check_yaml
from subquad.recipes import recipe_path

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
_load_yaml = jsonargparse.get_loader("yaml")


def _load_bounded(text: str) -> Any:
    """jsonargparse's loader for values and files; too deep a value would end the process, or take all memory."""
    try:
        _check_bounds(text, "the value")
    except BoundsError as error:
        raise yaml.YAMLError(str(error)) from error
    return _load_yaml(text)


def _check_bounds(text: str, where: str) -> None:
    """Raise `BoundsError` as `check_yaml`; text that is no YAML is left to whoever reads it."""
    try:
        check_yaml(text, where)
    except BoundsError:
        raise
    except ValueError:
        return


jsonargparse.set_loader("yaml", _load_bounded, exceptions=(yaml.YAMLError,))

Made = TypeVar("Made", bound=Config)
logger = logging.getLogger(__name__)
_FILES = ("--config", "--recipe")
SHORT = {"data": ("path", "PATH"), "pretrain": ("kind", "KIND")}
"""Groups of options that stand for one of them, and what that is called: `--data PATH` is `--data.path PATH`."""
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: --(?P<key>[^\s=]+)")
_UNKNOWN_KEYS = (
    re.compile(r'"(?P<group>[^"]+)":\s+Expected .* Got value: NestedArg\(key=\'(?P<key>[^\']+)\'', re.DOTALL),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
)
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes\s+Subtypes: \[(?P<types>.*?)\]\n.*Given value: (?P<value>.*)",
    re.DOTALL,
)
_LITERAL = re.compile(r"(?P<key>\S+): Expected a Literal\[(?P<choices>[^]]*)\]\. Got value: (?P<value>.*)", re.DOTALL)
_NO_GROUP = re.compile(r"Parser key \"(?P<group>[^\"]+)\":\s+Unable to load config '(?P<value>[^']*)'")
_NOT_FOR_FILES = {"help", "print_config", "print_shtab"}


class Parser(jsonargparse.ArgumentParser):
    """An argument parser whose errors are short, and name the valid choices and the file that is wrong."""

    def __init__(self, usage: str = "", description: str = "", **given: Any) -> None:
        # jsonargparse makes one without words, with settings of its own, for a configuration that may be null.
        words = {"prog": f"subquad {usage.partition(' ')[0]}", "usage": f"subquad {usage} [options]"}
        super().__init__(**{**words, "description": description, "allow_abbrev": False, **given})
        self.files: list[str] = []
        self.reading: str | None = None

    def add_files(self) -> None:
        """Add `--config FILE` and `--recipe NAME`."""
        help_text = "A YAML or JSON file, or the name of a shipped recipe, to start from; flags win over it."
        self.add_argument(*_FILES, action=_File, metavar="NAME", help=help_text)

    def add_config(self, config: type[Any]) -> None:
        """Add a flag for each field of `config`; the groups in `SHORT` can be given as a value alone."""
        self.add_class_arguments(config, None, as_group=False)
        for action in self._actions:
            group = action.option_strings[0].removeprefix("--") if len(action.option_strings) == 1 else ""
            if group in SHORT:
                option, action.metavar = SHORT[group]
                action.help = f"Short for --{group}.{option} {action.metavar}."
            elif action.dest == "options" or action.dest.endswith(".options"):
                _add_up(action)

    def add_options(self, help_text: str) -> None:
        """Add `--options.NAME.OPTION VALUE`."""
        _add_up(self.add_argument("--options", type=dict[str, dict[str, Any]], default={}, help=help_text))

    def add_optional(self, name: str, help_text: str, kind: Any = str) -> None:
        """Add an option, or an argument that may be left out, whose value is None where it is not given."""
        given: dict[str, Any] = {} if name.startswith("--") else {"nargs": "?"}
        self.add_argument(name, type=kind | None, default=None, help=help_text, **given)

    def add_yes_no(self, name: str, help_text: str) -> None:
        """Add `--name` (the default) and `--no-name`."""
        self.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=help_text)

    def add_device(self) -> None:
        """Add `--device`."""
        help_text = "auto: a GPU where PyTorch finds one; cpu: never."
        self.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=help_text)

    def helps(self) -> dict[str, str]:
        """Return the help text of each option."""
        return {action.dest: " ".join((action.help or "").split()) for action in self._actions}

    def made(self, config: type[Made], parsed: Any) -> Made:
        """Return the configuration whose fields `add_config` added."""
        values = self.instantiate(parsed)
        return config(**{field.name: values[field.name] for field in dataclasses.fields(config)})

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **named: Any) -> Any:  # type: ignore[override]
        """As argparse does; a flag may be written with dashes where its name has underscores."""
        self.files, self.reading = [], None
        return super().parse_args(None if args is None else [self._named(text) for text in args], *rest, **named)

    def _named(self, text: str) -> str:
        """`--keep-every=4` as `--keep_every=4`, where that is a flag and the first is none."""
        flag, equals, value = text.partition("=")
        flags = {option for action in self._actions for option in action.option_strings}
        other = "--" + flag.removeprefix("--").replace("-", "_")
        return other + equals + value if flag.startswith("--") and flag not in flags and other in flags else text

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Answer what a check of the arguments raises as `error` does. Around checks alone, before any work."""
        try:
            yield
        except (ValueError, TypeError, FileNotFoundError) as error:
            logger.debug("the check that refuses the arguments", exc_info=True)  # what --debug shows
            self.error(str(error))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one message with the valid choices and exit with status 2."""
        where, message = self._explain(message)
        self.exit(2, f"error: {f'in {where}: ' if where else ''}{message}\nsee {self.prog} --help\n")

    def _explain(self, message: str) -> tuple[str | None, str]:
        """The file that is wrong, if one is, and the message without Python's words for types."""
        if match := _UNKNOWN_FLAG.search(message):
            return None, self._unknown(match["key"])
        for pattern in _UNKNOWN_KEYS:  # found after all files are read: flags can't cause it
            if match := pattern.search(message):
                found = match.groupdict()
                key = f"{found['group']}.{found['key']}" if found.get("group") else found["key"]
                return next((file for file in self.files if _holds(file, key)), None), self._unknown(key)
        if (match := _NO_GROUP.match(message)) and not Path(match["value"]).is_file():
            group, value = match["group"], match["value"]
            return self.reading, f"{group}: there is no file {value!r}; {suggest(value, self._inside(group))}"
        message = re.sub(r"unrecognized arguments: (\S+).*", r"unexpected argument '\1'", message)
        message = re.sub(r"typing\.|<class '([^']+)'>", r"\1", message)
        return self.reading, _plain(re.sub(r'^Parser key "([^"]+)"( element \d+)?:\s*', r"\1\2: ", message))

    def _unknown(self, key: str) -> str:
        """Return that `key` is unknown, with the options of its group, else those of its names, or the groups."""
        group = key
        while group := group.rpartition(".")[0]:
            if inside := self._inside(group):
                return f"unknown option {key!r}; {suggest(key, inside)}"
        valid, first, last = sorted(self._valid_options()), key.partition(".")[0], key.rpartition(".")[2]
        groups = suggest(first, {option.partition(".")[0] for option in valid})
        same = [f"'{option}'" for option in valid if option.endswith(f".{first}")]  # --lr is --optimizer.lr
        if not same and groups.startswith("valid"):  # no group has a name like it
            same = [f"'{option}'" for option in valid if option.endswith(f".{last}")]
        return f"unknown option {key!r}; " + (f"did you mean {' or '.join(same)}?" if same else groups)

    def _inside(self, group: str) -> list[str]:
        """The options of a group, by their full names."""
        return [option for option in self._valid_options() if option.startswith(f"{group}.")]

    def _valid_options(self) -> set[str]:
        options = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        return {name for name in options if not name.startswith("-") and not name.endswith("+")} - _NOT_FOR_FILES


def _plain(message: str) -> str:
    """A message about a type on one line: None is no choice to speak of, and a `Literal` is its values."""
    if union := _UNION.search(message):
        types = union["types"].removesuffix(", NoneType")
        message = f"{message[: union.start()]}Expected a {types}. Got value: {union['value']}"
    if not (literal := _LITERAL.fullmatch(message)):
        return message
    key, value, choices = literal["key"], literal["value"], re.findall(r"'([^']*)'", literal["choices"])
    hint = suggest(value, choices)
    if len(choices) == 1:
        return f"unknown {key} {value!r}; {hint}"
    near = hint.rpartition("valid: ")[0].rstrip()
    message = f"{key} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}"
    return f"{message}; {near}" if near else message


class _File(jsonargparse.ActionConfigFile):
    """`--config FILE` and `--recipe NAME`."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if option_string == "--recipe":
            try:
                values = str(recipe_path(values))
            except ValueError as error:
                parser.error(str(error))
        path = Path(values)
        if not path.exists() and "{" not in values:  # else the content itself, as JSON
            parser.error(f"there is no file {values}")
        parser.files.append(values)
        parser.reading = values
        if path.is_file():  # a pipe can be read once
            with parser.checking():
                _check_file(values)
        super().__call__(parser, cfg, values, option_string)
        parser.reading = None


def _check_file(file: str) -> None:
    """Raise `ValueError` for a file that is no mapping, or that holds a text that jsonargparse could not read."""
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
    """Make `--options.NAME.OPTION VALUE` add to the options that NAME has; jsonargparse would replace them all."""
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


def _holds(file: str, key: str) -> bool:
    """Whether a file gives a value, or values, for the dotted `key`."""
    if not Path(file).is_file():
        return False
    values: Any = read_mapping(file)
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def data_is_a_path(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--data PATH` written out, as `--data.path PATH`, and the other groups of `SHORT` likewise."""
    groups = "|".join(SHORT)
    return [re.sub(rf"^--({groups})(?==|$)", lambda m: f"--{m[1]}.{SHORT[m[1]][0]}", text) for text in arguments]


def check_output(name: str, file: str | None) -> None:
    """Raise `ValueError` or `FileNotFoundError` where the file of `--name` can't be written, before any work."""
    if file is None:
        return
    if not file or Path(file).is_dir():
        raise ValueError(f"--{name} must be a file, got {file!r}")
    if not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(file).absolute().parent} for --{name}")


def files_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--config` and `--recipe` before all others, so that flags win wherever they stand."""
    files, rest = [], []
    left = iter(arguments)
    for argument in left:
        if argument in _FILES:
            files += [argument, *islice(left, 1)]
        elif argument.startswith(tuple(f"{name}=" for name in _FILES)):
            files.append(argument)
        else:
            rest.append(argument)
    return files + rest
