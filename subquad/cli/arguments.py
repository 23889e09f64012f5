"""Command-line parsers for configuration dataclasses: a field's docstring is the help of its option."""

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

from subquad import program
from subquad.config import Config, read_mapping, suggest
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
logger = logging.getLogger(__name__)
FILES = ("--config", "--recipe")
SHORT = {"data": ("path", "PATH"), "pretrain": ("kind", "KIND")}
"""Groups with a short form: `--data PATH` means `--data.path PATH`."""
RUN_HELP = (
    "Folder of a subquad model: a run, one of its checkpoints, a LoRA adapter (which finds its base), or what subquad "
    "import, convert or lora merge wrote. `subquad import` first makes one of another transformers model, such as that "
    "of a merged extension."
)
"""Help of the folder in commands that load it by `training.runs`."""
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
_LITERAL = re.compile(
    r"(?P<key>\S+): Expected a Literal\[(?P<choices>[^]]*)\](?P<null> or null)?\. Got value: (?P<value>.*)", re.DOTALL
)
_NO_GROUP = re.compile(r"Parser key \"(?P<group>[^\"]+)\":\s+Unable to load config '(?P<value>[^']*)'")
_NOT_FOR_FILES = {"help", "print_config", "print_shtab"}


class Parser(jsonargparse.ArgumentParser):
    """An argument parser with one-line errors that name the valid choices and the faulty file."""

    def __init__(self, command: str = "", description: str = "", **given: Any) -> None:
        # jsonargparse itself makes parsers without a command, with its own settings, for configurations that may be
        # null; programs beside the package give their own `prog` and `usage`.
        words = {"prog": program.command(*command.split()[:1]), "usage": f"subquad {command} [options]"}
        super().__init__(**{**words, "description": description, "allow_abbrev": False, **given})
        self.files: list[str] = []
        self.reading: str | None = None
        self.example = ""

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

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **named: Any) -> Any:  # type: ignore[override]
        """Parse as argparse does, accepting dashes and underscores for each other in an option's name."""
        self.files, self.reading = [], None
        return super().parse_args(None if args is None else [self._named(text) for text in args], *rest, **named)

    def _named(self, text: str) -> str:
        """Return `--keep_every=4` for `--keep-every=4`, and the reverse, if only the former is an option."""
        flag, equals, value = text.partition("=")
        if not flag.startswith("--"):
            return text
        flags = {option.replace("-", "_"): option for action in self._actions for option in action.option_strings}
        plain = flag.replace("-", "_")
        if re.match(r"__(\w+\.)*options\.", plain):  # of a mechanism: names without dashes
            return f"--{plain[2:]}{equals}{value}"
        return flags.get(plain, flag) + equals + value

    def format_help(self, *given: Any, **named: Any) -> str:
        """Return the help with `null` for None, as files and options have it, and the example after the usage."""
        text = re.sub(r"\bNone\b", "null", super().format_help(*given, **named))
        return text.replace("\n\n", f"\n\nexample:\n  {self.example}\n\n", 1) if self.example else text

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Report an exception within the block as wrong arguments. For checks only, before any work."""
        try:
            yield
        except (ValueError, TypeError, FileNotFoundError) as error:
            logger.debug("the check that refuses the arguments", exc_info=True)  # printed by --debug
            self.error(str(error))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one message with the valid choices and exit with status 2."""
        where, message = self._explain(message)
        self.exit(2, f"error: {f'in {where}: ' if where else ''}{in_yaml(message)}\nsee {self.prog} --help\n")

    def _explain(self, message: str) -> tuple[str | None, str]:
        """Return the faulty file, if any, and the message without Python's names of types."""
        if match := _UNKNOWN_FLAG.search(message):
            return None, self._unknown(match["key"])
        for pattern in _UNKNOWN_KEYS:  # raised once all files are read: only a file can have such a key
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
        """Return an error about the unknown `key` that suggests options of its group or name, or groups."""
        group = key
        while group := group.rpartition(".")[0]:
            if inside := self._inside(group):
                return f"unknown option {key!r}; {suggest(key, inside)}"
        valid, first, last = sorted(self._valid_options()), key.partition(".")[0], key.rpartition(".")[2]
        groups = suggest(first, {option.partition(".")[0] for option in valid})
        same = [f"'{option}'" for option in valid if option.endswith(f".{first}")]  # --lr is --optimizer.lr
        if not same and groups.startswith("valid"):  # no group has a similar name
            same = [f"'{option}'" for option in valid if option.endswith(f".{last}")]
        return f"unknown option {key!r}; " + (f"did you mean {' or '.join(same)}?" if same else groups)

    def _inside(self, group: str) -> list[str]:
        """Return the full names of a group's options."""
        return [option for option in self._valid_options() if option.startswith(f"{group}.")]

    def _valid_options(self) -> set[str]:
        options = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        return {name for name in options if not name.startswith("-") and not name.endswith("+")} - _NOT_FOR_FILES


def in_yaml(text: str) -> str:
    """Return a text without Python's words: `null`, choices without quotes, types without modules."""
    text = re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", "").replace(", ", " | "), text)
    text = re.sub(r"\bsubquad\.[a-z_.]+\.(?=[A-Z])", "", text)
    return re.sub(r"(?<!Got value: )(?<!['\"\w./-])None(?!['\"\w/-])", "null", text)  # the former as it was given


def _plain(message: str) -> str:
    """Return a message about a type on one line, with null for None and with a `Literal` as its values."""
    if union := _UNION.search(message):
        types = re.sub(", NoneType$", " or null", union["types"])
        message = f"{message[: union.start()]}Expected a {types}. Got value: {union['value']}"
    if not (literal := _LITERAL.fullmatch(message)):
        return message
    key, value, choices = literal["key"], literal["value"], re.findall(r"'([^']*)'", literal["choices"])
    choices += ["null"] if literal["null"] else []
    hint = suggest(value, choices)
    if len(choices) == 1:
        return f"unknown {key} {value!r}; {hint}"
    near = hint.rpartition("valid: ")[0].rstrip()
    message = f"{key} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}"
    return f"{message}; {near}" if near else message


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


def _holds(file: str, key: str) -> bool:
    """Return whether a file has a value for the dotted `key`."""
    if not Path(file).is_file():
        return False
    values: Any = read_mapping(file)
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


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
