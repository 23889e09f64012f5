"""Read JSON and YAML from untrusted files: safe loaders only, within bounds.

A `ValueError` that names the file refuses text that isn't UTF-8, values nested deeper than `DEPTH` (walking them would
exhaust the stack), YAML aliases that expand to more than `VALUES` values (a few lines can expand to billions) or to
themselves, strings that aren't Unicode, and more than `BYTES` bytes.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.extras import needed

DEPTH = 100
"""Largest nesting depth of mappings and lists."""
VALUES = 200_000
"""Largest number of values in a YAML file, aliases counted at each use."""
BYTES = 1 << 28
"""Largest size of a text file."""


class BoundsError(ValueError):
    """A text nests too deeply or expands to too many values."""


def read_text(path: str | Path) -> str:
    """Read a file's text; `ValueError` names a file that isn't UTF-8 or is too large."""
    with Path(path).open("rb") as stream:
        raw = stream.read(BYTES + 1)
    if len(raw) > BYTES:
        raise ValueError(f"{path} is larger than {BYTES:,} bytes, which no such file is")
    return decoded(raw, str(path))


def decoded(raw: bytes, where: str) -> str:
    """Decode UTF-8 bytes; `ValueError` names the first invalid byte."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}") from error


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises as `parse_json` and `read_text`, and `OSError` for a file that can't be read."""
    return parse_json(read_text(path), str(path))


def read_json_mapping(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a JSON file; `ValueError` names the file if it holds something else."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping, got {type(values).__name__}")
    return values


def check_keys(values: Any, kinds: Mapping[str, type], where: str) -> None:
    """Raise `ValueError` unless `values` is a mapping that has each of these keys with a value of its type."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} is damaged: it must hold a mapping, got {type(values).__name__}")
    for name, kind in kinds.items():
        if name not in values:
            raise ValueError(f"{where} is damaged: it has no {name!r}")
        value = values[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{where} is damaged: {name!r} must be a {kind.__name__}, got {reprlib.repr(value)}")


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; `ValueError` begins with `where`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    _check(value, where)
    return value


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text, by a safe loader; `ValueError` begins with `where`."""
    check_yaml(text, where)
    yaml = yaml_module(f"reading {where}")
    try:
        value = yaml.load(text, Loader=_loader(yaml))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # PyYAML's, of a tag that does not fit
        raise ValueError(f"{where} is not valid YAML: {error!r}") from error
    _check(value, where)
    return value


def check_yaml(text: str, where: str) -> None:
    """Raise `ValueError` for damaged YAML, `BoundsError` if it nests too deeply or expands to too many values.

    Events are read one by one and nothing is built, since the C loader crashes on deep recursion. Raises `ImportError`
    without PyYAML.
    """
    yaml = yaml_module(f"reading {where}")
    sizes: list[int] = [0]
    anchors: list[str | None] = []
    known: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=_loader(yaml)):
            if isinstance(event, yaml.CollectionStartEvent):
                sizes.append(1)
                anchors.append(event.anchor)
                known.pop(event.anchor or "", None)
                if len(anchors) > DEPTH:
                    raise _too_deep(where)
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = sizes.pop(), anchors.pop()
                known |= {anchor: size} if anchor else {}
                sizes[-1] += size
            elif isinstance(event, yaml.ScalarEvent):
                known |= {event.anchor: 1} if event.anchor else {}
                sizes[-1] += 1
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in anchors:
                    raise BoundsError(f"{where}: the alias *{event.anchor} stands for itself")
                sizes[-1] += known.get(event.anchor or "", 1)
            if sizes[-1] > VALUES:
                raise BoundsError(f"{where} stands for more than {VALUES:,} values, aliases written out")
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from error


def yaml_module(use: str) -> Any:
    """Return the module `yaml` for `use`, such as `reading a.yaml`; `ImportError` names the extra if it is missing."""
    with needed(use):
        import yaml
    return yaml


def _loader(yaml: Any) -> Any:
    """Return the safe loader of the module `yaml`, in C where PyYAML has it."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check(value: Any, where: str) -> None:
    """Raise `ValueError` if a value nests too deeply or holds half of a surrogate pair, which no file can store."""
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict | list | tuple | set) and depth >= DEPTH:
                raise _too_deep(where)
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list | tuple | set):
                below += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"{where} spells half a surrogate pair: {item[error.start]!r}") from error
        level, depth = below, depth + 1


def _too_deep(where: str) -> BoundsError:
    return BoundsError(f"{where} nests more than {DEPTH} deep")
