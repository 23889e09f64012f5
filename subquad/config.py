"""The base of every configuration: a frozen dataclass with strict reading and writing of YAML and JSON.

The docstring under a field is its help text on the command line. Errors name the valid keys and types.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, get_args, get_origin

from subquad.parsing import parse_yaml, read_json, read_text, yaml_module

_MOST_NAMED, _FEW = 20, 8
"""Largest number of choices that an error lists in full, and how many it lists of more."""

_ELSEWHERE = {
    other: ours
    for ours, others in {
        "dim": "hidden_size d_model n_embd embed_dim",
        "num_layers": "num_hidden_layers n_layer n_layers",
        "num_heads": "num_attention_heads n_head n_heads nhead",
        "num_kv_heads": "num_key_value_heads n_kv_heads",
        "head_dim": "head_size d_head",
        "width": "sliding_window window_size",
        "causal": "is_causal",
        "ff_dim": "intermediate_size dim_feedforward d_ff n_inner",
        "feedforward": "hidden_act activation_function",
        "max_positions": "max_position_embeddings n_positions",
        "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
        "rope_base": "rope_theta",
        "rope_fraction": "partial_rotary_factor",
        "qkv_bias": "attention_bias",
        "tie_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
        "auto": "cuda gpu",
        "full": "sdpa softmax mha attention eager flash flash_attention flash_attention_2",
        "mamba2": "mamba ssm ssd",
        "mlstm": "xlstm",
        "shifted": "longlora",
        "window": "swa",
    }.items()
    for other in others.split()
}
"""Our names of options and mechanisms by the names in transformers, PyTorch and papers, which users may type."""
_INSTEAD = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        "there is no mixture of experts (docs/limits.md)",
    ),
    "alibi": "there are no ALiBi biases (docs/limits.md)",
    "add_cross_attention": "there is no cross-attention (docs/limits.md)",
    "gqa": "grouped queries are an option: 'full' with num_kv_heads",
    "mqa": "grouped queries are an option: 'full' with num_kv_heads=1",
    "rwkv": "there is no RWKV, 'gla' (version 6) and 'kda' (version 7) are nearest",
}
"""Hints for names that have no counterpart here."""


def check_at_least(least: float, prefix: str = "", /, **numbers: float | None) -> None:
    """Raise `ValueError` for a number below `least`, named with `prefix`; None is accepted."""
    for name, value in numbers.items():
        if value is not None and not value >= least:
            raise ValueError(f"{prefix}{name} must be at least {least}, got {value}")


def check_positive(prefix: str = "", /, **numbers: float | None) -> None:
    """Raise `ValueError` for a number that isn't positive and finite, named with `prefix`; None is accepted."""
    for name, value in numbers.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{prefix}{name} must be a positive number, got {value}")


def check_fraction(prefix: str = "", /, **numbers: float | None) -> None:
    """Raise `ValueError` for a number outside `[0, 1]`, named with `prefix`; None is accepted."""
    for name, value in numbers.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{prefix}{name} must lie between 0 and 1, got {value}")


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message that lists the valid choices, the nearest first; of many only the nearest."""
    valid = sorted(choices)
    near = difflib.get_close_matches(word, valid, n=1)
    hint = known_elsewhere(word, valid) or (f"did you mean {near[0]!r}? " if near else "")
    if len(valid) <= _MOST_NAMED:
        return f"{hint}valid: {', '.join(valid)}"
    nearest = difflib.get_close_matches(word, valid, n=_FEW, cutoff=0.0)
    return f"{hint}valid: {', '.join(nearest)} and {len(valid) - _FEW} more"


def known_elsewhere(word: str, choices: Iterable[str]) -> str:
    """Return a hint, and a space, for what other libraries call one of `choices` or have and we lack; else nothing."""
    group, dot, name = word.rpartition(".")
    if name in _INSTEAD:
        return f"{_INSTEAD[name]}; "
    ours = f"{group}{dot}{_ELSEWHERE.get(name, '')}"
    return f"did you mean {ours!r}? " if ours in choices else ""


_TYPES: dict[type[Any], Mapping[str, Any]] = {}


def type_hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields; each evaluation of their annotations takes most of a millisecond."""
    if cls not in _TYPES:
        _TYPES[cls] = typing.get_type_hints(cls)
    return _TYPES[cls]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen, keyword-only dataclass with strict reading and a stable digest."""

    def __new__(cls, *_: Any, **values: Any) -> Self:
        cls._check_keys(values, TypeError)
        return super().__new__(cls)

    @classmethod
    def _check_keys(cls, keys: Iterable[Any], error: type[Exception], where: str = "") -> None:
        """Raise `error` for a key that is no field, with the valid ones."""
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        for key in keys:
            if key not in known:
                raise error(f"{cls.__qualname__} has no key {_join(where, str(key))!r}; {suggest(str(key), known)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """Build the configuration from plain values.

        Raises `ValueError` for an unknown or a missing key and `TypeError` for a value of the wrong type; both name the
        full path of the key.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"{where or cls.__name__} must be a mapping, got {values!r}")
        hints = type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        cls._check_keys(values, ValueError, where)
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in values:
                raise ValueError(f"{cls.__qualname__} needs the key {_join(where, name)!r}")
        return cls(**{key: _convert(value, hints[key], _join(where, key)) for key, value in values.items()})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a `.yaml`, `.yml` or `.json` file; raises as `from_dict`, and the errors name the file."""
        values = read_mapping(path)
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: dicts, lists, strings and numbers."""
        return dict(_plain(self))

    def to_file(self, path: str | Path) -> None:
        """Write YAML, or JSON if the name ends with .json."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
        yaml = yaml_module(f"writing {path}")
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; checks run again."""
        return dataclasses.replace(self, **changes)

    def check_least(self, group: str = "", /, **least: float) -> None:
        """Raise `ValueError` if a field is below its least value; `group` is the configuration's key."""
        for name, bound in least.items():
            check_at_least(bound, f"{group}." if group else "", **{name: getattr(self, name)})

    def digest(self) -> str:
        """Return sixteen hexadecimal digits that differ when any value differs."""
        return digest(self.to_dict())


class Record:
    """A dataclass of results."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def digest(values: Any) -> str:
    """Return sixteen hexadecimal digits of the canonical JSON of plain values."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; `ValueError` names the file if it holds something else."""
    path = Path(path)
    values = read_json(path) if path.suffix == ".json" else parse_yaml(read_text(path), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
    return values


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _plain(value: Any) -> Any:
    """Return a configuration's plain values."""
    if isinstance(value, Config):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _check_plain(value: Any, where: str) -> None:
    """Raise `TypeError` for values that YAML has and JSON lacks: dates, bytes, sets."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, _join(where, str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    elif not isinstance(value, str | bool | int | float | Config | None):
        raise TypeError(
            f"{where} must be a number, a text, a bool, null, a list or a mapping, "
            f"got {type(value).__name__}: {value!r}"
        )


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Convert `value` to the type `hint`: configurations from mappings, tuples from lists, floats from integers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        _check_plain(value, where)
        return value
    if origin is typing.Literal:
        if value not in arguments:
            choices = suggest(str(value), [str(choice) for choice in arguments])
            raise ValueError(f"{where} must be one of its choices, got {value!r}; {choices}")
        return value
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(value, option, where)
            except TypeError:
                continue
        raise TypeError(f"{where} must be {hint}, got {value!r}")
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {key: _convert(item, arguments[1], _join(where, str(key))) for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value, where=where)
    if hint is int and type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(
            f"{where} must lie between -2^63 and 2^64 - 1, got a whole number of {value.bit_length()} bits"
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024:
        return float(value)
    if hint is float and isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)  # YAML 1.1 takes 1e-3, without a point, for a string
    if isinstance(value, float) and value != value:
        raise ValueError(f"{where} must be a number, got {value!r}")
    wanted = origin or hint
    if isinstance(value, wanted) and not (isinstance(value, bool) and wanted in (int, float)):
        return value
    raise TypeError(f"{where} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")


def differences(made: Mapping[str, Any], now: Mapping[str, Any], most: int = 8) -> list[str]:
    """Return `name was A, is B` for each setting that differs, by dotted name, and a count beyond `most`."""
    before, after = _dotted(made), _dotted(now)
    changed = [
        f"{name} was {_in_yaml(before.get(name))}, is {_in_yaml(after.get(name))}"
        for name in {**after, **before}  # a setting may be left out in one of them
        if before.get(name) != after.get(name)
    ]
    return changed if len(changed) <= most else [*changed[:most], f"and {len(changed) - most} more"]


def _in_yaml(value: Any) -> str:
    return "null" if value is None else repr(value)


def _dotted(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names; an empty one stays."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _dotted(value, f"{where}{key}.")
        else:
            found[f"{where}{key}"] = value
    return found
