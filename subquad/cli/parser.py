"""The parser of a command: its help, and errors of one line that name the valid choices."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from subquad import program
from subquad.config import read_mapping, suggest

logger = logging.getLogger(__name__)
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


class PlainParser(argparse.ArgumentParser):
    """An argument parser with one-line errors that name the valid choices and the faulty file."""

    def __init__(self, command: str = "", description: str = "", **given: Any) -> None:
        # jsonargparse itself makes parsers without a command, with its own settings, for configurations that may be
        # null; programs beside the package give their own `prog` and `usage`.
        words = {"prog": program.command(*command.split()[:1]), "usage": f"subquad {command} [options]"}
        super().__init__(**{**words, "description": description, "allow_abbrev": False, **given})
        self.files: list[str] = []
        self.reading: str | None = None
        self.example = ""

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
